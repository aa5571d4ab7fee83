"""What becomes of the state at each step, told from the masks of a call: for gradients that are
computed for all steps at once."""

from typing import Callable, NamedTuple, Optional, Tuple

import torch

Masks = Tuple[Optional[torch.Tensor], ...]  # reset, hold, lengths, cu_seqlens


class Marks(NamedTuple):
    """What becomes of the state at each step."""

    held: Optional[torch.Tensor]  # [B, T, 1...] bool: it passes through; None if no step is held
    cleared: Optional[torch.Tensor]  # [B, T, 1...] bool: it is emptied before the step
    first: torch.Tensor  # [B, T, 1...] bool: it is a given one, because a sequence begins
    sequence: torch.Tensor  # [B, T] int: the sequence's row of the given states [S, ...]

    def keep(self, gain: torch.Tensor, when_held: float) -> torch.Tensor:
        """Returns the derivative of the state after each step by the state before it, if it is
        `gain` at the steps that are not held."""
        if self.held is not None:
            gain = torch.where(self.held, when_held, gain)
        return gain if self.cleared is None else torch.where(self.cleared, 0.0, gain)

    def given(self, state: torch.Tensor) -> torch.Tensor:  # [S, ...] -> [B, T, ...]
        return state[self.sequence]

    def to_given(self, d: torch.Tensor, sequences: int) -> torch.Tensor:
        """Sums d [B, T, ...] of first steps into rows of the given states: [S, ...]."""
        rows = torch.where(self.first, d, 0.0).flatten(0, 1)
        total = rows.new_zeros(sequences, *rows.shape[1:])
        return total.index_add(0, self.sequence.flatten(), rows)

    def leave(
        self, entering: torch.Tensor, scan_back: Callable
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Takes gradients of the state before each step to those of the state after the step that
        computed it. Returns what enters each step, held ones too, and what leaves each step."""
        leaving = shift(torch.where(self.first, 0.0, entering))
        if self.held is None:
            return entering, leaving
        passes = self.keep(torch.zeros_like(leaving), 1.0)
        leaving = scan_back(leaving, torch.where(self.first, 0.0, passes))
        return entering + passes * leaving, torch.where(self.held, 0.0, leaving)


def shift(d: torch.Tensor) -> torch.Tensor:
    """Returns d [B, T, ...] of the next step, 0 after the last."""
    return torch.cat([d[:, 1:], torch.zeros_like(d[:, :1])], 1)


def find_marks(x: torch.Tensor, masks: Masks, dims: int = 2) -> Marks:
    """`dims` is the number of dimensions of a state behind its batch; x is [B, T, ...]."""
    reset, hold, lengths, cu_seqlens = masks
    B, T = x.shape[:2]
    time = torch.arange(T, device=x.device).expand(B, T)
    if cu_seqlens is None:
        sequence, first = torch.arange(B, device=x.device)[:, None].expand(B, T), time == 0
    else:
        starts = cu_seqlens.long()
        sequence = torch.searchsorted(starts[1:], time.contiguous(), right=True)
        first = time == starts[sequence]
    if lengths is not None:
        past = time >= lengths[:, None]
        hold = past if hold is None else hold | past
        reset = None if reset is None else reset & ~past
    place = (..., *[None] * dims)
    wide = lambda mark: None if mark is None else mark[place]
    return Marks(wide(hold), wide(reset), first[place], sequence)
