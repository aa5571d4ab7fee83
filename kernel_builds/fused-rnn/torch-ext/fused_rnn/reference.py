"""The recurrence as a plain loop over time, in torch, differentiable by autograd."""

from typing import NamedTuple, Optional, Tuple

import torch

from .cells import Cell


class RecurrentProduct(torch.autograd.Function):
    """r = weight h. Operands of a product are rounded to the I/O dtype, here and in its gradients."""

    @staticmethod
    def forward(ctx, h, weight, dtype: torch.dtype, grad_clip: Optional[float]):
        # h [B, N, D], weight [G, N, D, D] -> [G, B, N, D], all in the state dtype
        operand = h.to(dtype).to(h.dtype)
        ctx.save_for_backward(operand, weight)
        ctx.dtype, ctx.grad_clip = dtype, grad_clip
        return torch.einsum("bnk,gnjk->gbnj", operand, weight)

    @staticmethod
    def backward(ctx, dr):
        operand, weight = ctx.saved_tensors
        dr = dr.to(ctx.dtype).to(dr.dtype)
        dh = torch.einsum("gbnj,gnjk->bnk", dr, weight)
        if ctx.grad_clip is not None:
            dh = dh.clamp(-ctx.grad_clip, ctx.grad_clip)
        return dh, torch.einsum("gbnj,bnk->gnjk", dr, operand), None, None


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
        r = list(RecurrentProduct.apply(states[0], w, x.dtype, grad_clip))
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
    cleared = None if reset is None else reset[0][index] & inside
    return Documents(x[0][index], (cleared, held), inside)
