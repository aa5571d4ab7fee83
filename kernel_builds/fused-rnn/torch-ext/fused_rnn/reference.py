"""The recurrence as a plain loop over time, in torch, differentiable by autograd."""

from typing import NamedTuple, Optional, Tuple

import torch

from .cells import Cell


class RecurrentOperand(torch.autograd.Function):
    """h rounded to the I/O dtype, as the product takes it; its gradient is clipped, not rounded."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, dtype: torch.dtype, grad_clip: Optional[float]):
        ctx.grad_clip = grad_clip
        return h.to(dtype).to(h.dtype)

    @staticmethod
    def backward(ctx, dh: torch.Tensor):
        return dh if ctx.grad_clip is None else dh.clamp(-ctx.grad_clip, ctx.grad_clip), None, None


def sequence(
    cell: Cell,
    x: torch.Tensor,  # [B, T, G, N, D]
    weight: torch.Tensor,  # [G, N, D, D]
    bias: Optional[torch.Tensor],  # [R, N, D]
    state: Optional[torch.Tensor],  # [K, B, N, D]
    reset: Optional[torch.Tensor],  # [B, T]
    hold: Optional[torch.Tensor],  # [B, T]
    grad_clip: Optional[float],
) -> Tuple[torch.Tensor, torch.Tensor]:  # h [B, T, N, D], last [K, B, N, D]
    """Runs `cell` along T. Every 16-bit operand is widened, so sums are in the state dtype."""
    B, T, G, N, D = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    w = weight.to(dtype)
    if bias is None:
        bias = x.new_zeros(cell.bias_rows, N, D, dtype=dtype)
    states = tuple(x.new_zeros(cell.states, B, N, D, dtype=dtype) if state is None else state)
    outputs = []
    for t in range(T):
        if reset is not None:
            cleared = reset[:, t, None, None]
            states = tuple(torch.where(cleared, 0.0, s) for s in states)
        operand = RecurrentOperand.apply(states[0], x.dtype, grad_clip)
        r = list(torch.einsum("bnk,gnjk->gbnj", operand, w))
        if cell.bias_rows > G:
            r[-1] = r[-1] + bias[G]
        after = cell.step(tuple(x[:, t, g].to(dtype) + bias[g] for g in range(G)), tuple(r), states)
        h = after[0]
        if hold is not None:
            held = hold[:, t, None, None]
            after = tuple(torch.where(held, s, a) for s, a in zip(states, after))
            h = torch.where(held, 0.0, h)
        states = after
        outputs.append(h.to(x.dtype))
    h = torch.stack(outputs, 1) if outputs else x.new_zeros(B, 0, N, D)
    return h, torch.stack(states)


class Documents(NamedTuple):
    """One row of packed documents as a padded batch; places past a document's end are held."""

    x: torch.Tensor  # [S, L, G, N, D]
    masks: Tuple[Optional[torch.Tensor], torch.Tensor]  # reset, hold [S, L]
    inside: torch.Tensor  # [S, L] places that are steps, in the order of the row

    def unpack(self, h: torch.Tensor) -> torch.Tensor:  # [S, L, N, D] -> [1, T, N, D]
        return h[self.inside].unsqueeze(0)


def documents(x: torch.Tensor, cu_seqlens: torch.Tensor, reset, hold) -> Documents:
    """Document s is x[0, cu_seqlens[s] : cu_seqlens[s + 1]]; reset and hold are [1, T] or None."""
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    longest = int((ends - starts).max()) if len(starts) else 0
    index = starts + torch.arange(longest, device=x.device)  # [S, L] row of x[0]
    inside = index < ends
    index = torch.where(inside, index, 0)
    held = ~inside if hold is None else ~inside | hold[0][index]
    return Documents(x[0][index], (None if reset is None else reset[0][index], held), inside)
