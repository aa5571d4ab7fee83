"""Fuzzes the raw torch.ops: records the arguments of public calls, then changes them.

Every op of a kernel's namespace is known from its schema, so none can be forgotten. What an op makes of
odd strides, of memory that it does not own and of sizes is compared with itself, given plain copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuzzing.draw import Draw
from fuzzing.faults import spoil
from fuzzing.oracle import check_refusal, is_out_of_memory, is_readable, shorten, tensors

Call = tuple[Any, dict[str, Any]]  # the op, its arguments by name


def namespace(kernel: Any) -> dict[str, Any]:
    """Returns the ops of a kernel by name."""
    prefix = str(kernel.dispatch.ops.name) if hasattr(kernel.dispatch.ops, "name") else ""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == prefix:
            found[name] = getattr(getattr(torch.ops, space), name).default
    return found


class Recorder(TorchDispatchMode):
    """Records copies of the arguments of every call of the given ops."""

    def __init__(self, ops: dict[str, Any]):
        super().__init__()
        self.ops, self.calls = set(ops.values()), []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function in self.ops:
            names = [a.name for a in function._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.calls.append((function, {k: copied(v) for k, v in given.items()}))
        return function(*args, **(kwargs or {}))


def copied(value: Any) -> Any:
    """Copies a tensor to new memory with the same strides, if no two elements overlap."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        plain = value.is_contiguous() or 0 in value.stride() or 0 in value.shape
        copy = (
            value.clone()
            if plain
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        )
        return copy if plain else copy.copy_(value)
    if isinstance(value, (tuple, list)):
        return [copied(v) for v in value]
    return value


def plain(value: Any) -> Any:
    """Returns a contiguous copy in new memory."""
    if isinstance(value, torch.Tensor):
        if not is_readable(value):
            raise ValueError("freed")
        return (
            value.detach().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
        )
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def results(op: Any, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        named = dict(tensors(op(**call), "result"))
    for key, value in call.items():
        named |= dict(tensors(value, key))
    return named


def check_raw(draw: Draw, op: Any, call: dict[str, Any], poisoned: Callable):
    draw.raw = True
    given = {k: copied(v) for k, v in call.items()}
    done = spoil(draw, given, list(given))
    name = op._schema.name.rpartition("::")[2]
    title = f"ops.{name}({', '.join(done)})"
    try:
        same = {k: plain(v) for k, v in given.items()}
    except Exception:
        same = None  # torch itself cannot read a tensor: the op must refuse it
    try:
        with poisoned():
            got = results(op, given)
    except Exception as error:
        names = [a.name for a in op._schema.arguments]
        names.append(r"kept \w+")  # one of several tensors is named by what it holds
        problem = check_refusal(error, names, done, raw=True)
        if is_out_of_memory(error, done):
            problem = None
        if problem is None and not done:
            problem = f"what the entry gave is refused: {shorten(str(error))}"
        return title, False, [problem] if problem else []
    if same is None:
        return title, True, ["is accepted, though torch itself cannot read an argument"]
    if any(t.is_meta for t in got.values()):
        return title, True, []
    try:
        want = results(op, same)
    except Exception as error:
        return title, True, [f"plain copies are refused: {shorten(str(error))}"]
    if name.endswith("_layers_fwd"):  # memory that aligns the packed weights is not written
        got.pop("result[2][0]", None)
    wrong = [n for n, t in got.items() if not agree(t, want[n])]
    return title, True, [f"{n} is not that of plain copies" for n in wrong]


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are equal up to rounding, with NaN in the same places."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    gap = 64 * torch.finfo(wide).eps + 2 * torch.finfo(a.dtype).eps  # roundings of sums and result
    return torch.allclose(a.double(), b.double(), gap, gap, equal_nan=True)
