"""Records the torch ops of a function and replays them without the Python that called them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..utils.private_names import (
    TAPE,
    TorchDispatchMode,
    op_of,
    pop_dispatch_mode,
    push_dispatch_mode,
    schema_of,
)


class Unrecordable(RuntimeError):
    """The function did more than run ops on tensors; the message says what."""


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Records the ops that a function runs.

    The replay runs the ops on the same tensors: parameters, buffers and all other tensors that
    existed before are read and written in place, and only the ops' results are new. Views of
    existing tensors are made once, at recording. Ops such as .item(), which read a value into
    Python, raise Unrecordable, because later ops could depend on the value.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}  # id of a tensor -> its name
        self._alive: list[Any] = []  # so that no id is used twice
        self._fixed: set[int] = set()  # tensors that were there before, and views of them
        self._bases: dict[int, torch.Tensor] = {}  # id of a view -> the op's result that it views
        self._layouts: dict[Any, str] = {}  # names of what an op returns and its views
        self._scope: dict[str, Any] = {}
        # result, call, what it reads, whether it writes
        self._steps: list[tuple[str, str, set[str], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in _leaves((*args, *kwargs.values())) if isinstance(x, torch.Tensor)]
        results = [x for x in _leaves([out]) if x is not None]
        if not given and not any(isinstance(x, torch.Tensor) for x in results):
            return out  # an op on dtypes, such as promote_types: a constant
        if not all(isinstance(x, torch.Tensor) for x in results):
            raise Unrecordable(f"{func} reads a value")
        for x in given:
            if id(x) not in self._names:
                self._fix(x)
        returns = schema_of(func).returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            if all(id(x) in self._fixed for x in given):
                for x in results:
                    self._fix(x)
                return out
            if len(given) == 1 and all(_is_plain(x, given[0]) for x in results):
                for x in results:
                    self._view(x, self._bases.get(id(given[0]), given[0]))
                return out
        called = [self._text(x) for x in args]
        called += [f"{key}={self._text(x)}" for key, x in kwargs.items()]
        # op_of saves the Python frame of OpOverload.__call__, which only forwards its arguments
        name = self._run(op_of(func), called, given, schema_of(func).is_mutable)
        many = isinstance(out, (tuple, list))
        for i, x in enumerate(out if many else [out]):
            if isinstance(x, torch.Tensor) and id(x) not in self._names:
                self._name(x, f"{name}[{i}]" if many else name)
                self._layouts[id(x), _layout(x)] = self._names[id(x)]
        return out

    def _view(self, x: torch.Tensor, base: torch.Tensor) -> None:
        """Gives `x`, a view of an op's result `base`, the name of an equal view or records a new
        view."""
        key = id(base), _layout(x)
        if key not in self._layouts:
            called = [self._names[id(base)], *map(repr, _layout(x))]
            # torch.as_strided takes half the time of torch.ops.aten.as_strided.
            self._layouts[key] = self._run(torch.as_strided, called, [base])
        self._name(x, self._layouts[key])
        self._bases[id(x)] = base

    def _run(
        self, func: Any, called: list[str], given: list[torch.Tensor], writes: bool = False
    ) -> str:
        name, reads = f"r{len(self._steps)}", {self._result(x) for x in given}
        call = f"{self._keep('f', func)}({', '.join(called)})"
        self._steps.append((name, call, reads, writes))
        return name

    def _fix(self, x: torch.Tensor) -> None:
        self._name(x, self._keep("t", x))
        self._fixed.add(id(x))

    def _name(self, x: torch.Tensor, name: str) -> None:
        if id(x) not in self._names:
            self._alive.append(x)
            self._names[id(x)] = name

    def _keep(self, letter: str, value: Any) -> str:
        name = f"{letter}{len(self._scope)}"
        self._scope[name] = value
        return name

    def _result(self, x: torch.Tensor) -> str:  # the name of the step that gives x
        return self._names[id(x)].split("[")[0]

    def _text(self, x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return self._names[id(x)]
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(self._text, x))}]"
        return repr(x) if x is None or type(x) in (bool, int) else self._keep("c", x)

    def record(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs `function`, and returns a function that replays its ops and returns their result.

        The mode is pushed and popped by C functions instead of `with self`, whose methods are
        Python: Ctrl-C in one of those would leave the mode on for every later op of the process.
        """
        if TAPE.reason is not None:
            raise Unrecordable(TAPE.reason)
        try:
            push_dispatch_mode(self)
            result = function()
        finally:
            pop_dispatch_mode(None)
        return self._replay(result)

    def _replay(self, result: torch.Tensor) -> Callable[[], torch.Tensor]:
        if id(result) not in self._names:
            raise Unrecordable("the result is of no op")
        wanted, lines = {self._result(result)}, [f"    return {self._names[id(result)]}"]
        for name, call, reads, writes in reversed(self._steps):
            if writes or name in wanted:  # an op whose result nobody reads need not run
                wanted |= reads
                lines.append(f"    {name} = {call}")
        text = "\n".join(["def run():", *reversed(lines)])
        exec(compile(text, "<recorded step>", "exec"), self._scope)
        return self._scope.pop("run")  # left there, it would be a reference cycle


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yields what is in nested lists and tuples, the only containers that ops take and return."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _layout(x: torch.Tensor) -> Any:  # size, stride, offset
    return tuple(x.shape), x.stride(), x.storage_offset()


def _is_plain(x: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether view `x` differs from `base` in shape, strides and offset only."""
    strided = x.layout == base.layout == torch.strided
    return strided and x.dtype == base.dtype and not (x.is_conj() or x.is_neg())
