"""Checks the kernels' guides: their size, and the sections that comments and docstrings name.

Each check takes the names of the files and a function that returns a file's text, and yields the
violations.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator

Text = Callable[[str], "str | None"]
GUIDE = "kernel_builds/*/README.md"
LINES, COLUMNS = 200, 120
SOURCES = ("kernel_builds/*/csrc/*", "kernel_builds/*/torch-ext/*")
# The quoted section after README.md may stand on the next line of a comment.
POINTER = re.compile(r'\b(README|NOTEBOOK)\b(?:\.md,\s+(?:(?://|#)\s*)?"([^"\n]+)")?')


def violations(names: Iterable[str], text: Text) -> Iterator[str]:
    names = tuple(names)
    yield from sizes(names, text)
    yield from pointers(names, text)


def guides(names: Iterable[str]) -> list[str]:
    """Returns the README.md of every kernel."""
    return [name for name in names if fnmatch.fnmatch(name, GUIDE) and name.count("/") == 2]


def sizes(names: tuple[str, ...], text: Text) -> Iterator[str]:
    """Checks that a guide has at most LINES lines of COLUMNS columns."""
    for name in guides(names):
        lines = (text(name) or "").splitlines()
        if len(lines) > LINES:
            yield f"{name}: {len(lines)} lines, but a guide has at most {LINES}"
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, but a guide has at most {COLUMNS}"


def pointers(names: tuple[str, ...], text: Text) -> Iterator[str]:
    """Checks that a source which names its guide or notebook quotes a section that exists."""
    for name in names:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in SOURCES):
            continue
        for found in POINTER.finditer(text(name) or ""):
            line = (text(name) or "").count("\n", 0, found.start()) + 1
            page = "/".join([*name.split("/")[:2], f"{found.group(1)}.md"])
            section = found.group(2)
            if section is None:
                yield f'{name}:{line}: {found.group(1)}: must be {found.group(1)}.md, "a section"'
            elif not re.search(rf"^##+ {re.escape(section)}$", text(page) or "", re.MULTILINE):
                yield f"{name}:{line}: {page} has no section {section!r}"
