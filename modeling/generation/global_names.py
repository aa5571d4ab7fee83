"""What the code of a model's classes reads by global names, which others can replace while the code stays.

Code says which names it reads: torch.nn.functional.silu is `functional` and `silu` in the code of its
caller. Those are looked up in the code's own module, in torch and in its tensors; and the same for the
functions of this package and of torch.nn.functional that are found there.
"""

import operator
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

# Remote code lies flat, in transformers_modules.<repository>.<revision>.
REMOTE = __name__.startswith("transformers_modules.")
PACKAGE = __name__.rpartition(".")[0] if REMOTE else __name__.partition(".")[0]
TORCH: tuple[Any, ...] = (
    vars(torch),
    vars(nn.functional),
    vars(torch.Tensor),
    vars(torch._C.TensorBase),
)
OPERATORS = {name for name in dir(torch.Tensor) if name.startswith("__") and name != "__doc__"}


class GlobalNames:
    """Of the code of `kinds`, as they are now."""

    def __init__(self, kinds: Iterable[type]):
        names: dict[int, set[str]] = {id(table): set(OPERATORS) for table in TORCH}
        tables: dict[int, Any] = {id(table): table for table in TORCH}
        waiting, seen = [f for kind in kinds for f in _functions(kind)], set[CodeType]()
        while waiting:
            function = waiting.pop()
            if function.__code__ in seen:
                continue
            seen.add(function.__code__)
            tables[id(function.__globals__)] = function.__globals__
            for table in (function.__globals__, *TORCH):
                found = _names(function.__code__) & table.keys()
                names.setdefault(id(table), set()).update(found)
                for value in (table[name] for name in found):
                    if isinstance(value, type) and _is_own(value.__module__):
                        waiting += _functions(value)
                    elif isinstance(value, FunctionType) and _is_own(value.__module__):
                        waiting.append(_unwrap(value))
        wanted = ((sorted(names[key] & table.keys()), table) for key, table in tables.items())
        # the first one twice: of a single name, itemgetter would give no tuple
        self._read = [(operator.itemgetter(*n, n[0]), table) for n, table in wanted if n]
        self._values = self._look()

    @property
    def tables(self) -> list[Any]:
        return [table for _, table in self._read]

    def hold(self) -> bool:
        return self._look() == self._values

    def _look(self) -> tuple[list[int], list[Any]]:
        """A table that has grown may hide a name of another one, as a class one of its base's."""
        return [len(t) for _, t in self._read], [read(table) for read, table in self._read]

    def __iter__(self) -> Iterator[Any]:
        for values in self._values[1]:
            yield from values


def _is_own(module: Any) -> bool:
    return str(module).startswith(f"{PACKAGE}.") or module == nn.functional.__name__


def _unwrap(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _functions(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        function = _unwrap(value.fget if isinstance(value, property) else value)
        if isinstance(function, FunctionType):
            yield function


def _names(code: CodeType) -> set[str]:
    """With those of the functions that are made inside."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
