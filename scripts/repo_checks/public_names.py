"""Finds a package's public names without importing it. Standard library only."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def undocumented(name: str) -> Iterator[str]:
    """Yields the names in __all__ that have no docstring where they are defined."""
    body = parse(name).body
    lists = [n.value for n in body if isinstance(n, ast.Assign) and assigns(n, "__all__")]
    if not lists:
        yield f"{name}: has no __all__"
    for public in ast.literal_eval(lists[0]) if lists else ():
        where, node = definition(name, public)
        if node is None:
            yield f"{name}: __all__ has {public}, which {where} does not define"
        elif not isinstance(node, ast.Assign | ast.AnnAssign):
            decorators = getattr(node, "decorator_list", ())
            generated = any("auto_docstring" in ast.dump(d) for d in decorators)
            if not (ast.get_docstring(node) or generated):
                yield f"{where}: {public} is public, but has no docstring"


def assigns(node: ast.AST, name: str) -> bool:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return any(isinstance(n, ast.Name) and n.id == name for t in targets if t for n in ast.walk(t))


def definition(name: str, public: str) -> tuple[str, ast.AST | None]:
    """Returns the file and the statement that define `public`, following re-exports."""
    nodes = list(ast.walk(parse(name)))
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and assigns(node, public):
            return name, node
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == public:
            return name, node
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and public in [a.asname or a.name for a in node.names]:
            folder = name.rsplit("/", 1)[0]
            if node.module is None:  # from . import a_module
                return f"{folder}/{public}.py", parse(f"{folder}/{public}.py")
            module = node.module.replace(".", "/")
            for base in (f"{folder}/{module}", module):
                for file in (f"{base}.py", f"{base}/__init__.py"):
                    if file != name and (ROOT / file).is_file():
                        return definition(file, public)
    return name, None
