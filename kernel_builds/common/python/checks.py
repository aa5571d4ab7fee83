"""Checks single arguments; errors name the argument, what it was and what it must be.

The kernels share this file; each kernel's arguments.py checks how arguments must fit together.

Shapes, dtypes and devices are static, so a compiled graph carries no trace of these checks. Values
(the order of cu_seqlens, the range of lengths) are checked on the CPU always, on CUDA only under
FLASHCELL_CHECK=1, because reading them there would make the host wait.
"""

import os
import sys
from typing import Any, Optional, Sequence, Tuple

import torch

from .cells import CELLS, Cell
from .dispatch import shown
from .formulas import has_tangent, in_forward_mode
from .memory import check_memory

# name, value, shape, and the shape's letters for messages.
Named = Tuple[str, Any, Tuple[int, ...], str]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# The most elements of a tensor (4 TB of fp32). More is a mistake, and products of sizes would
# overflow.
MOST_ELEMENTS = 2**40
STRIDED = torch.strided


def find_cell(name: str) -> Cell:
    if not isinstance(name, str) or name not in CELLS:
        check_choice("cell", name, tuple(CELLS))
    return CELLS[name]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {shown(value)}, but must be one of {', '.join(choices)}")


def check_tensor(name: str, value: object, device: Optional[torch.device] = None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be a tensor")
    if value.layout is not torch.strided or value.is_nested:
        had = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name} has layout {had}, but must be a plain strided tensor")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, but must be on {device}, where x is")
    return value


def check_floating(name: str, value: torch.Tensor) -> None:
    if value.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name} has dtype {value.dtype}, but must be one of {allowed}")


def check_shape(name: str, value: torch.Tensor, shape: Tuple[int, ...], letters: str) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but must be {letters} = {list(shape)}"
        )


def check_operand(
    name: str, value, shape: Tuple[int, ...], letters: str, device: torch.device
) -> None:
    """Raises unless `value` is a floating tensor of this shape on this device."""
    if (  # a single test for the usual case: calls take most of a decoding step's time
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.shape == shape
        and value.dtype in DTYPES
        and value.device == device
    ):
        return
    check_tensor(name, value, device)
    check_floating(name, value)
    check_shape(name, value, shape, letters)


def check_operands(named: Sequence[Named], dtype: torch.dtype, device: torch.device) -> None:
    """Raises unless all are tensors of this dtype on this device; a bias may be None."""
    for name, value, shape, letters in named:
        try:
            if (
                isinstance(value, torch.Tensor)
                and value.layout is STRIDED
                and value.shape == shape
                and value.dtype is dtype
                and value.device == device
            ):
                continue
        except RuntimeError:  # a nested tensor has no shape
            pass
        if value is None and name == "bias":
            continue
        check_operand(name, value, shape, letters, device)
        raise TypeError(f"{name} has dtype {value.dtype}, but must be {dtype}")


def check_input(name: str, value) -> None:
    """Raises unless `value` is a floating tensor; its shape determines what the others must be."""
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.dtype in DTYPES
    ):
        check_size(name, value)
        return
    check_tensor(name, value)
    check_floating(name, value)


def check_size(name: str, value: torch.Tensor) -> None:
    """Raises if the tensor is too large: an expanded view can have more elements than memory could
    hold results."""
    try:
        if torch.compiler.is_compiling():
            return  # torch.export would bound a size that it leaves open; the op checks it
        count = value.numel()
        if isinstance(count, torch.SymInt) or 0 < count < 2**31:
            return
        fits = count <= MOST_ELEMENTS and all(n < 2**31 for n in value.shape)
    except RuntimeError:  # the number of elements exceeds 64 bits
        fits = False
    if not fits:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but must have sizes below 2^31 and at most 2^40 "
            "elements"
        )


def check_number(name: str, value: object, wanted: str = "a number >= 0") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be {wanted}")
    too_large = isinstance(value, int) and value > sys.float_info.max
    if too_large or not value >= 0:
        had = "larger than any float" if too_large else value
        raise ValueError(f"{name} is {had}, but must be {wanted}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be True or False")


def check_whole(name: str, value: object, least: int, wanted: str) -> None:
    """Raises unless `value` is an int >= `least` that fits 32 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ValueError(f"{name} is {shown(value)}, but must be {wanted}")


def check_count(name: str, tensors: object, count: int, who: str) -> None:
    if not isinstance(tensors, (tuple, list)) or len(tensors) != count:
        had = f"{len(tensors)} tensors" if isinstance(tensors, (tuple, list)) else ""
        had = had or type(tensors).__name__
        raise ValueError(f"{name} is {had}, but {who} needs a tuple of {count} tensors")


def check_no_gradient(who: str, names: Sequence[str], *values) -> None:
    """Raises if a value needs a gradient or has a tangent; `names` are as in check_memory."""
    recorded = torch.is_grad_enabled()
    if not (recorded or in_forward_mode()):
        return
    for at, value in enumerate(values):
        if value is None:
            continue
        tangent = has_tangent(value)
        if tangent or (recorded and value.requires_grad):
            last = len(names) - 1
            name = names[at] if at < last else f"{names[last]}[{at - last}]"
            had = "has a tangent" if tangent else "requires a gradient"
            raise ValueError(f"{name} {had}, but {who} is for decoding and has no derivatives")


def is_dense(*values: Optional[torch.Tensor]) -> bool:
    return all(value is None or value.is_contiguous() for value in values)


def check_mask(name: str, mask: Optional[torch.Tensor], x: torch.Tensor) -> None:
    if mask is None:
        return
    check_tensor(name, mask, x.device)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}, but must be bool")
    check_shape(name, mask, x.shape[:2], "[B, T]")
    check_memory((name, name), mask)


def check_integers(name: str, value: Optional[torch.Tensor], x: torch.Tensor) -> None:
    if value is None:
        return
    check_tensor(name, value, x.device)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {value.dtype}, but must be int32 or int64")
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must have one dimension")
    check_size(name, value)
    check_memory((name, name), value)


def check_state(cell: Cell, state, shape: Tuple[int, ...], letters: str, x: torch.Tensor) -> None:
    if state is None:
        return
    check_count("state", state, cell.states, cell.name)
    for k, s in enumerate(state):
        check_operand(STATE[k], s, shape, letters, x.device)


STATE = tuple(f"state[{k}]" for k in range(8))


def check_masks(x: torch.Tensor, reset, hold, lengths, cu_seqlens) -> int:
    """Checks the masks and lengths of a sequence op; returns the number of sequences, S."""
    if reset is None and hold is None and lengths is None and cu_seqlens is None:
        return x.shape[0]
    check_mask("reset", reset, x)
    check_mask("hold", hold, x)
    check_integers("lengths", lengths, x)
    check_integers("cu_seqlens", cu_seqlens, x)
    B = x.shape[0]
    if lengths is not None and cu_seqlens is None:
        check_shape("lengths", lengths, (B,), "[B]")
    if cu_seqlens is None:
        return B
    if lengths is not None:
        raise ValueError("lengths and cu_seqlens are both given, but only one may be")
    if B != 1:
        raise ValueError(f"x has batch {B}, but must have batch 1 when cu_seqlens is given")
    if len(cu_seqlens) == 0:
        raise ValueError("cu_seqlens is empty, but must hold S + 1 offsets, the first of them 0")
    return len(cu_seqlens) - 1


def reads_values(x: torch.Tensor) -> bool:
    """Whether checks may read the values of tensors on x's device."""
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" or os.environ.get("FLASHCELL_CHECK") == "1"


def check_values(x: torch.Tensor, lengths, cu_seqlens) -> None:
    """Checks the values of lengths and cu_seqlens. The CPU binary checks them again, for compiled
    graphs."""
    if (lengths is None and cu_seqlens is None) or not reads_values(x):
        return
    T = x.shape[1]
    if lengths is not None and bool(((lengths < 0) | (lengths > T)).any()):
        raise ValueError(
            f"lengths is {lengths.tolist()}, but every length must be in 0..T = 0..{T}"
        )
    if cu_seqlens is not None:
        ordered = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
        if not ordered or int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != T:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.tolist()}, but must start at 0, never decrease, "
                f"and end at T = {T}"
            )
