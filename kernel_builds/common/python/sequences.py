"""Prepares batches for the loops of all kernels: rows, documents and padding become one batch with
masks."""

from typing import NamedTuple, Optional

import torch

from .formulas import is_eager


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states and sums of inputs in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Lowered(NamedTuple):
    """A batch of sequences that needs no masks other than reset and hold."""

    x: torch.Tensor  # [S, L, ...]
    reset: Optional[torch.Tensor]  # [S, L]
    hold: Optional[torch.Tensor]  # [S, L]
    inside: Optional[torch.Tensor]  # [S, L] which places are steps of a packed row, in its order

    def unpack(self, h: torch.Tensor) -> torch.Tensor:
        """Returns h [S, L, ...] in the layout of the original x."""
        return h if self.inside is None else h[self.inside].unsqueeze(0)


def lower_masks(x: torch.Tensor, reset, hold, lengths, cu_seqlens) -> Lowered:
    """Replaces lengths and cu_seqlens by hold; x is [B, T, ...]."""
    if cu_seqlens is not None:
        return _documents(x, cu_seqlens, reset, hold)
    if lengths is not None:
        past = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        hold = past if hold is None else hold | past
        reset = None if reset is None else reset & ~past
    return Lowered(_without_held(x, hold), reset, hold, None)


def _documents(x: torch.Tensor, cu_seqlens: torch.Tensor, reset, hold) -> Lowered:
    """Document s is x[0, cu_seqlens[s] : cu_seqlens[s + 1]]; places past its end are held."""
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    longest = int((ends - starts).max()) if len(starts) else 0
    index = starts + torch.arange(longest, device=x.device)  # [S, L] row of x[0]
    inside = index < ends
    index = torch.where(inside, index, 0)
    held = ~inside if hold is None else ~inside | hold[0][index]
    cleared = None if reset is None else reset[0][index] & inside
    return Lowered(_without_held(x[0][index], held), cleared, held, inside)


def _without_held(x: torch.Tensor, hold) -> torch.Tensor:
    """Returns x with zeros at held steps: their values must not matter, but NaN times 0 is NaN."""
    return x if hold is None else x.masked_fill(hold[(..., *[None] * (x.dim() - 2))], 0.0)


def stack_states(states) -> torch.Tensor:
    """Returns [K, S, N, D], without a copy if they are an op's last states, as between two decoding
    steps."""
    first = states[0]
    if len(states) == 1:
        return first.unsqueeze(0)
    if is_eager() and not any(s.requires_grad for s in states) and _follow_each_other(states):
        return first.as_strided((len(states), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(states)


def _follow_each_other(states) -> bool:
    """Whether the states lie behind each other in one storage, in fp32."""
    first = states[0]
    try:
        begin, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        return first.element_size() == 4 and all(
            s.is_contiguous()
            and s.data_ptr() == begin + k * first.numel() * 4
            and s.untyped_storage().data_ptr() == storage
            and not s.is_neg()
            for k, s in enumerate(states)
        )
    except RuntimeError:  # a fake tensor has no address
        return False
