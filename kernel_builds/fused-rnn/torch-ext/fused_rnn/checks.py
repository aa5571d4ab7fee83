"""Checks of single arguments: an error says its name, what it was and what it must be.

The kernels share this file; what a cell's arguments are together stands in arguments.py.

Shapes, dtypes and devices are static, so a compiled graph carries no trace of these checks. Values
(the order of cu_seqlens, the range of lengths) are checked on the CPU always, on CUDA only under
FLASHCELL_CHECK=1, because reading them there would make the host wait.
"""

import os
from typing import Optional, Sequence, Tuple

import torch

from .cells import CELLS, Cell

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def find_cell(name: str) -> Cell:
    if name not in CELLS:
        raise ValueError(f"cell is {name!r}, but must be one of {', '.join(CELLS)}")
    return CELLS[name]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}")


def check_tensor(name: str, value: object, device: Optional[torch.device] = None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be a tensor")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, but must be on {device}, where x is")
    return value


def check_floating(name: str, value: torch.Tensor) -> None:
    if value.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name} has dtype {value.dtype}, but must be one of {allowed}")


def check_shape(name: str, value: torch.Tensor, shape: Tuple[int, ...], letters: str) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but must be {letters} = {list(shape)}"
        )


def check_number(name: str, value: object, wanted: str = "a number >= 0") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be {wanted}")
    if not value >= 0:
        raise ValueError(f"{name} is {value}, but must be {wanted}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be True or False")


def check_count(name: str, tensors: object, count: int, who: str) -> None:
    if not isinstance(tensors, (tuple, list)) or len(tensors) != count:
        had = f"{len(tensors)} tensors" if isinstance(tensors, (tuple, list)) else ""
        had = had or type(tensors).__name__
        raise ValueError(f"{name} is {had}, but {who} needs a tuple of {count} tensors")


def check_mask(name: str, mask: Optional[torch.Tensor], x: torch.Tensor) -> None:
    if mask is None:
        return
    check_tensor(name, mask, x.device)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}, but must be bool")
    check_shape(name, mask, tuple(x.shape[:2]), "[B, T]")


def check_integers(name: str, value: Optional[torch.Tensor], x: torch.Tensor) -> None:
    if value is None:
        return
    check_tensor(name, value, x.device)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {value.dtype}, but must be int32 or int64")
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must have one dimension")


def check_state(cell: Cell, state, shape: Tuple[int, ...], letters: str, x: torch.Tensor) -> None:
    if state is None:
        return
    check_count("state", state, cell.states, cell.name)
    for k, s in enumerate(state):
        check_tensor(f"state[{k}]", s, x.device)
        check_floating(f"state[{k}]", s)
        check_shape(f"state[{k}]", s, shape, letters)


def check_masks(x: torch.Tensor, reset, hold, lengths, cu_seqlens) -> int:
    """The options of every sequence op; returns the number of sequences, S."""
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


def check_values(x: torch.Tensor, lengths, cu_seqlens) -> None:
    """What only the values tell. The CPU binary checks it again, for compiled graphs."""
    if (lengths is None and cu_seqlens is None) or torch.compiler.is_compiling():
        return
    if x.device.type != "cpu" and os.environ.get("FLASHCELL_CHECK") != "1":
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
