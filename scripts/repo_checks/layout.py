"""Checks the repository's layout: file names, folder sizes, edits of sys.path, import circles.

Each takes the names of the files and a function that gives a file's text, and yields its violations.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib; pytest installs tomli
    import tomli as tomllib

Text = Callable[[str], "str | None"]
Graph = dict[str, set[str]]
# File names that transformers asks for.
CONVENTIONS = ("modeling/modeling_*.py", "configuration/configuration_*.py")
PATH_EDIT = re.compile(
    r"sys\.path(?:\.(?:insert|append|extend|remove)\(|(?:\[[^]\n]*\])?\s*[+|]?=(?!=))"
)
MOST_PATH_EDITORS = 2
MOST_FILES = 15
ONE_KIND = [  # files that do not count: their folder holds any number of their kind
    ("tests/*", "test_*.py"),
    ("tests/clients", "train_*.py"),  # one program each
    ("scripts/results", "*"),
    ("scripts", "[!_.]*"),  # commands
    ("*/instantiations", "*"),
    ("*", "__init__.py"),
]
FLAT = {  # folders of more files, and why
    "kernel_builds/*/torch-ext/*": "the Hub publishes a kernel's Python as one flat package",
}
ROOTS = ("scripts", "tests", "tests/support", "kernel_builds/builder")


def violations(names: Iterable[str], text: Text) -> Iterator[str]:
    names = tuple(names)
    yield from prefixes(names)
    yield from commands(names)
    yield from path_edits(names, text)
    yield from large_folders(names)
    yield from circles(names, text)


def prefixes(names: tuple[str, ...]) -> Iterator[str]:
    """Checks that no file name begins with the name of a folder that it lies in or beside."""
    folders = defaultdict(set)
    for name in names:
        path = PurePath(name)
        for folder in path.parents:
            folders[str(folder.parent)].add(folder.name)
    for name in names:
        path = PurePath(name)
        if not path.suffix or any(fnmatch.fnmatch(name, pattern) for pattern in CONVENTIONS):
            continue
        stem = path.stem.lstrip("_").removeprefix("test_").replace("-", "_")
        for folder in sorted({*path.parent.parts, *folders[str(path.parent)]}):
            if folder and stem.startswith(f"{folder.replace('-', '_')}_"):
                yield f"{name}: begins with the folder {folder}, but a folder's name is said once"


def commands(names: tuple[str, ...]) -> Iterator[str]:
    """Checks that scripts/ holds commands and folders only, and no name begins with _."""
    for name in names:
        path = PurePath(name)
        if path.parts[0] != "scripts" or path.suffix == ".md":
            continue
        special = re.fullmatch(r"__\w+__\.py", path.name)
        if len(path.parts) == 2 and path.suffix and not special:
            yield f"{name}: is no command, but must lie in a folder of scripts/"
        elif path.name.startswith("_") and not special:
            yield f"{name}: begins with _, but a folder of scripts/ is for its commands alone"


def path_edits(names: tuple[str, ...], text: Text) -> Iterator[str]:
    """Checks that only allowed files edit sys.path; others rely on the command's folder or
    pytest."""
    editors = [
        n
        for n in names
        if not n.endswith((".md", ".csv", ".svg")) and PATH_EDIT.search(text(n) or "")
    ]
    if len(editors) > MOST_PATH_EDITORS:
        yield f"{', '.join(editors)}: edit sys.path, but at most {MOST_PATH_EDITORS} files may"


def large_folders(names: tuple[str, ...]) -> Iterator[str]:
    """Checks that no folder has too many files that are not of one kind."""
    sizes: Counter[str] = Counter()
    for name in names:
        folder, _, last = name.rpartition("/")
        if not any(fnmatch.fnmatch(folder, f) and fnmatch.fnmatch(last, n) for f, n in ONE_KIND):
            sizes[folder] += 1
    for folder, size in sorted(sizes.items()):
        if size > MOST_FILES and not any(fnmatch.fnmatch(folder, pattern) for pattern in FLAT):
            yield f"{folder or '.'}: has {size} files, but at most {MOST_FILES} that are not of one kind"


def circles(names: tuple[str, ...], text: Text) -> Iterator[str]:
    """Checks that there are no import circles between files or folders, functions included."""
    files = imported(names, text)
    yield from (
        f"{' -> '.join(found)}: files import each other in a circle" for found in cycles(files)
    )
    folders: Graph = defaultdict(set)
    for name, others in files.items():
        for other in others:
            ends = [PurePath(n).parent.as_posix() for n in (name, other)]
            packages = (name + other).count("__init__.py")  # these collect the modules below them
            if ends[0] != ends[1] and not packages:
                folders[ends[0]].add(ends[1])
    yield from (
        f"{' -> '.join(found)}: folders import each other in a circle" for found in cycles(folders)
    )


def modules(names: tuple[str, ...], text: Text) -> dict[str, str]:
    """Returns dotted name -> file, for the package (by pyproject.toml) and for sys.path."""
    project = tomllib.loads(text("pyproject.toml") or "")
    packages = project["tool"]["setuptools"]["package-dir"]
    found = {}
    for name in names:
        path = PurePath(name)
        if path.suffix != ".py":
            continue
        module = path.with_suffix("")
        for package, folder in packages.items():
            if path.parent == PurePath(folder):
                found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = name
        for root in ROOTS:
            if module.is_relative_to(root):
                parts = module.relative_to(root).parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found.setdefault(".".join(parts), name)
    found.pop("", None)
    return found


def imported(names: tuple[str, ...], text: Text) -> Graph:
    """Returns file -> the files of the repository that it imports."""
    known = modules(names, text)
    graph: Graph = {}
    for module, name in known.items():
        package = module if name.endswith("__init__.py") else module.rpartition(".")[0]
        graph.setdefault(name, set())
        for node in ast.walk(ast.parse(text(name) or "")):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
                both = [(f"{base}.{alias.name}", base) for alias in node.names]
                wanted = [one if one in known else other for one, other in both]
            else:
                continue
            graph[name] |= {known[one] for one in wanted if one in known and known[one] != name}
    return graph


def cycles(graph: Graph) -> Iterator[list[str]]:
    """Yields import circles, one for each node that is in none of those before."""
    seen: set[str] = set()
    for start in sorted(graph):
        if start in seen:
            continue
        came: dict[str, str] = {}
        queue = [start]
        while queue and start not in came:
            node = queue.pop(0)
            for other in sorted(graph.get(node, ())):
                if other not in came:
                    came[other] = node
                    queue.append(other)
        if start in came:
            road = [start]
            while len(road) == 1 or road[-1] != start:
                road.append(came[road[-1]])
            seen |= set(road)
            yield road[::-1]
