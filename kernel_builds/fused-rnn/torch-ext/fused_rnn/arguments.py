"""Validates the arguments of cells: how x, weight, bias and the states must fit together."""

import torch

from .cells import Cell
from .checks import (
    check_input,
    check_masks,
    check_number,
    check_operand,
    check_state,
)
from .memory import check_memory


def check_x(cell: Cell, x: torch.Tensor, letters: str, dims: int) -> None:
    check_input("x", x)
    if x.dim() != dims or x.shape[-3] != cell.gates:
        raise ValueError(
            f"x has shape {list(x.shape)}, but must be {letters} with G = {cell.gates} for {cell.name}"
        )


def check_parameters(cell: Cell, x, weight, bias) -> None:
    G, N, D = x.shape[-3:]
    check_operand("weight", weight, (G, N, D, D), "[G, N, D, D]", x.device)
    if bias is not None:
        check_operand("bias", bias, (cell.bias_rows, N, D), "[R, N, D]", x.device)


STORED = ("x", "weight", "bias", "state")


def check_sequence(cell: Cell, x, weight, bias, state, reset, hold, lengths, cu_seqlens) -> None:
    """Raises TypeError or ValueError for arguments that a sequence op cannot take."""
    check_x(cell, x, "[B, T, G, N, D]", 5)
    check_parameters(cell, x, weight, bias)
    sequences = check_masks(x, reset, hold, lengths, cu_seqlens)
    letters = "[B, N, D]" if cu_seqlens is None else "[S, N, D]"
    check_state(cell, state, (sequences, *x.shape[-2:]), letters, x)
    check_memory(STORED, x, weight, bias, *(state or ()))


def check_clips(cell: Cell, grad_clip, clip_state) -> None:
    if clip_state is not None:
        check_number("clip_state", clip_state, "None or a number > 0")
        if clip_state == 0:
            raise ValueError("clip_state is 0, but must be None or a number > 0")
        if not cell.bounded:
            raise ValueError(
                f"clip_state is {clip_state}, but must be None for {cell.name}, which has no bound: "
                "lstm, gru and rnn clip states"
            )
    if grad_clip is not None:
        check_number("grad_clip", grad_clip, "None or a number >= 0")
