"""Tracks the global names that a model's classes use, to notice when one is replaced (monkey
patching).

A code object lists the names that it reads: a call of torch.nn.functional.silu lists `functional`
and `silu`. These names are looked up in the code's own module, in torch and in torch.Tensor.
Functions of this package and of torch.nn.functional that are found there are searched in the same
way.
"""

import operator
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

# transformers puts all files of remote code in one package: transformers_modules.<repository>.<revision>.
REMOTE = __name__.startswith("transformers_modules.")
PACKAGE = __name__.rpartition(".")[0] if REMOTE else __name__.partition(".")[0]
TORCH: tuple[Any, ...] = (
    vars(torch),
    vars(nn.functional),
    vars(torch.Tensor),
    vars(torch.Tensor.__base__),
)
OPERATORS = {name for name in dir(torch.Tensor) if name.startswith("__") and name != "__doc__"}


class GlobalNames:
    """The current values of all global names that the code of the classes `kinds` reads."""

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
        """Returns each table's size and the values found; a grown table may shadow a name of
        another."""
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
    """Returns the names that a code object reads, nested functions included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
