"""Validates arguments: how x, the weights and the states must fit together, and a and b of a scan."""

from typing import Tuple

import torch

from .cells import Cell
from .checks import (
    check_choice,
    check_flag,
    check_input,
    check_masks,
    check_number,
    check_operand,
    check_state,
    check_values,
    check_whole,
)
from .memory import check_memory

METHODS = ("auto", "sequential", "multiple_shooting", "newton")
WIDEST_BLOCK = 4


def sizes(x: torch.Tensor) -> Tuple[int, int, int]:
    """Returns B, T, D of x [B, T, G, D] or, in N heads, [N, B, T, G, D / N]."""
    B, T, _, D = x.shape[-4:]
    return B, T, D if x.dim() == 4 else D * x.shape[0]


def check_x(cell: Cell, x: torch.Tensor, letters: str, dims: int) -> None:
    check_input("x", x)
    in_heads = x.dim() == dims + 1 and x.shape[0] > 0
    if not (x.dim() == dims or in_heads) or x.shape[-2] != cell.gates:
        raise ValueError(
            f"x has shape {list(x.shape)}, but must be [{letters}, 3, D] for {cell.name}, or in N > 0 "
            f"heads [N, {letters}, 3, D / N]"
        )
    check_memory(("x", "x"), x)


def check_rows(name: str, value, rows: int, D: int, x: torch.Tensor) -> None:
    check_operand(name, value, (rows, D), "[3, D]" if rows == 3 else "[2, D]", x.device)


def check_sequence(cell: Cell, x, state, reset, hold, lengths, cu_seqlens) -> None:
    """Raises TypeError or ValueError for arguments that a sequence op cannot take."""
    rows = x if x.dim() == 4 else x[0]
    sequences = check_masks(rows, reset, hold, lengths, cu_seqlens)
    letters = "[B, D]" if cu_seqlens is None else "[S, D]"
    check_state(cell, state, (sequences, sizes(x)[2]), letters, x)
    check_memory(("state",), *(state or ()))
    check_values(rows, lengths, cu_seqlens)


def check_method(method, tol, max_iters) -> None:
    check_choice("method", method, METHODS)
    check_tolerance(tol)
    if max_iters is not None:
        check_whole("max_iters", max_iters, 0, "None or an int >= 0")


def check_tolerance(tol) -> None:
    if tol is not None:
        check_number("tol", tol, "None or a number >= 0")


def check_scan(a, b, h0, reverse, block: bool) -> None:
    check_flag("reverse", reverse)
    check_input("b", b)
    if b.dim() != 3 + block:
        letters = "[B, T, D, n]" if block else "[B, T, D]"
        raise ValueError(f"b has shape {list(b.shape)}, but must be {letters}")
    if block and not 1 <= b.shape[-1] <= WIDEST_BLOCK:
        raise ValueError(f"b has blocks of {b.shape[-1]}, but n must be in 1..{WIDEST_BLOCK}")
    shape, letters = tuple(b.shape), "[B, T, D]"
    if block:
        shape, letters = (*shape, shape[-1]), "[B, T, D, n, n]"
    check_operand("a", a, shape, letters, b.device)
    if h0 is not None:
        check_operand("h0", h0, (b.shape[0], *b.shape[2:]), "b without T", b.device)
    check_memory(("a", "b", "h0", "h0"), a, b, h0)
