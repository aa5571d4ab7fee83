"""Resets to given states: a sequence is split at each reset, and each part is a document with an
initial state of its own. The parts run at the same time.
"""

from typing import NamedTuple, Optional, Sequence, Tuple

import torch

from .cells import Cell
from .checks import check_count, check_operand, check_tensor, reads_values
from .memory import check_memory
from .sequences import state_dtype


def check_reset_state(cell: Cell, x: torch.Tensor, reset, reset_state) -> None:
    """Raises TypeError or ValueError for a reset_state that does not fit x [B, T, G, N, D] and reset
    [B, T]."""
    if reset is None:
        raise ValueError("reset_state is given without reset, but holds the states for its marks")
    check_count("reset_state", reset_state, cell.states, cell.name)
    rows = check_tensor("reset_state[0]", reset_state[0]).shape[:1].numel()
    for k, s in enumerate(reset_state):
        check_operand(f"reset_state[{k}]", s, (rows, *x.shape[-2:]), "[R, N, D]", x.device)
    check_memory(("x",) + ("reset_state",) * cell.states, x, *reset_state)
    if reads_values(x) and rows != int(reset.sum()):
        raise ValueError(
            f"reset_state has {rows} rows, but must have {int(reset.sum())}, one for each mark of "
            "reset"
        )


class Parts(NamedTuple):
    """A packed row of the parts of all sequences."""

    x: torch.Tensor  # [1, B T, G, N, D]
    state: Tuple[torch.Tensor, ...]  # K tensors [S + R, N, D]
    hold: Optional[torch.Tensor]  # [1, B T]
    cu_seqlens: torch.Tensor  # [S + R + 1]
    ends: torch.Tensor  # [S] the last part of each sequence
    shape: torch.Size  # B, T

    def join(self, h: torch.Tensor) -> torch.Tensor:  # [1, B T, N, D] -> [B, T, N, D]
        return h.view(*self.shape, *h.shape[2:])


def split(x: torch.Tensor, state: Optional[Sequence[torch.Tensor]], masks, reset_state) -> Parts:
    """Splits the sequences in front of every marked step. `masks` are reset, hold, lengths and
    cu_seqlens; `state` K tensors [S, N, D] or None, `reset_state` K tensors [R, N, D]."""
    reset, hold, lengths, cu_seqlens = masks
    B, T = x.shape[:2]
    total, count = B * T, len(reset_state[0])
    if cu_seqlens is None:
        starts = T * torch.arange(B, device=x.device)
    else:
        starts = cu_seqlens[:-1].long().clamp(0, total)
    counted = reset
    if lengths is not None:
        past = torch.arange(T, device=x.device) >= lengths[:, None]
        hold, counted = past if hold is None else hold | past, reset & ~past
    marks = torch.nonzero_static(reset.flatten(), size=count, fill_value=total).squeeze(1)
    # Where a sequence begins at a marked step, an empty part comes first, whose state is not used.
    order = torch.cat([2 * starts, 2 * marks + 1]).argsort(stable=True)
    begins = torch.cat([starts, marks])[order]
    offsets = torch.cat([begins, begins.new_full((1,), total)])
    if state is None:
        state = [s.new_zeros(len(starts), *s.shape[1:]) for s in reset_state]
    wide = state_dtype(x.dtype)
    joined = tuple(torch.cat([a.to(wide), b.to(wide)])[order] for a, b in zip(state, reset_state))
    # A sequence's last part begins at its last mark that counts; marks past its end do not.
    seen = torch.cat([starts.new_zeros(1), counted.flatten().cumsum(0)])
    all_seen = torch.cat([starts.new_zeros(1), reset.flatten().cumsum(0)])
    until = torch.cat([starts[1:], starts.new_full((1,), total)]) if len(starts) else starts
    own = seen[until] - seen[starts]
    ends = torch.arange(len(starts), device=x.device) + all_seen[starts] + own
    flat = x.reshape(1, total, *x.shape[2:])
    hold = None if hold is None else hold.reshape(1, total)
    return Parts(flat, joined, hold, offsets, ends, x.shape[:2])
