"""Finds uses of other packages' private names outside of the modules that collect them.

A private name is one that begins with an underscore. It is our own if a class here defines it, if it
is set on self, or if it is a global of a module here.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator

Text = Callable[[str], "str | None"]
SHIPPED = (
    "modeling/*.py",
    "configuration/*.py",
    "kernel_builds/common/python/*.py",
    "kernel_builds/*/torch-ext/*.py",
)
COLLECTED = "private_names.py"  # the file in which each has a fallback
PRIVATE = re.compile(r"_(?!_)\w+")
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # documented for Python's named tuples
IN_PLACE = {  # file -> names used there, and why
    "modeling/hub/kernel_loader.py": {"_dynamo_marked_constant"},  # its public setter loads Dynamo
}


def violations(names: Iterable[str], text: Text) -> Iterator[str]:
    shipped = [n for n in names if any(fnmatch.fnmatch(n, pattern) for pattern in SHIPPED)]
    trees = {name: ast.parse(text(name) or "") for name in shipped}
    members = {m for tree in trees.values() for m in defined_members(tree)}
    module_names = {m for tree in trees.values() for m in defined_in_module(tree)}
    for name, tree in trees.items():
        if name.rpartition("/")[2] == COLLECTED:
            continue
        known = members | PUBLIC | IN_PLACE.get(name, set())
        for line, used in uses(tree, known, module_names):
            yield (
                f"{name}:{line}: uses {used}, a private name of another package, but only "
                f"{COLLECTED} may, with what happens where it is missing"
            )


def is_private(name: str | None) -> bool:
    return name is not None and PRIVATE.fullmatch(name) is not None


def defined_members(tree: ast.AST) -> Iterator[str]:
    """Yields what classes define, what is set on self or cls, and keys that are set in vars()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from defined_in_module(node)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ("self", "cls"):
            if isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.Assign):
            slots = [t for t in node.targets if isinstance(t, ast.Subscript) and is_vars(t.value)]
            yield from (str(getattr(slot.slice, "value", None)) for slot in slots)


def defined_in_module(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yields the functions, classes and variables that stand directly in a module or class."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part.id for part in parts if isinstance(part, ast.Name))


def is_vars(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "vars"


def uses(tree: ast.Module, members: set[str], module_names: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each private name that is not our own."""
    relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    ours = {alias.asname or alias.name for node in relative for alias in node.names}
    for node in ast.walk(tree):
        found: list[str | None] = []
        if isinstance(node, ast.Attribute):
            own = getattr(node.value, "id", None) in ours and node.attr in module_names
            found = [] if own else [node.attr]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            found = [getattr(argument, "value", None) for argument in node.args[1:2]]
        elif isinstance(node, ast.Subscript) and is_vars(node.value):
            found = [getattr(node.slice, "value", None)]
        for name in found:
            if isinstance(name, str) and is_private(name) and name not in members:
                yield node.lineno, name
