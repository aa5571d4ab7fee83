"""The recurrence as a plain loop over time, in torch, differentiable by autograd."""

from typing import List, Optional, Tuple

import torch

from .cells import Cell
from .formulas import in_forward_mode, is_transformed
from .sequences import state_dtype


def multiply(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """h [B, N, D], weight [G, N, D, D] -> [G, B, N, D]. Unlike einsum, matmul also runs in
    torch.autograd.functional's vectorized forward mode."""
    return (h.transpose(0, 1) @ weight.mT).transpose(1, 2)


class RecurrentProduct(torch.autograd.Function):
    """Computes r = weight h. Operands of products are rounded to the I/O dtype, in the gradients
    too."""

    @staticmethod
    def forward(ctx, h, weight, dtype: torch.dtype, grad_clip: Optional[float]):
        # h [B, N, D], weight [G, N, D, D] -> [G, B, N, D], all in the state dtype
        operand = h.to(dtype).to(h.dtype)
        ctx.save_for_backward(operand, weight)
        ctx.dtype, ctx.grad_clip = dtype, grad_clip
        return multiply(operand, weight)

    @staticmethod
    def backward(ctx, dr):
        operand, weight = ctx.saved_tensors
        dr = dr.to(ctx.dtype).to(dr.dtype)
        if ctx.grad_clip == 0:
            dh = torch.zeros_like(operand)
        else:
            dh = torch.einsum("gbnj,gnjk->bnk", dr, weight)
        if ctx.grad_clip is not None:
            dh = dh.clamp(-ctx.grad_clip, ctx.grad_clip)
        return dh, torch.einsum("gbnj,bnk->gnjk", dr, operand), None, None


class TransformableProduct(RecurrentProduct):
    """RecurrentProduct in the form that torch.func needs, with derivatives in forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, weight, dtype, grad_clip):  # type: ignore[override]
        return multiply(h.to(dtype).to(h.dtype), weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        h, weight, ctx.dtype, ctx.grad_clip = inputs
        ctx.save_for_backward(h.to(ctx.dtype).to(h.dtype), weight)
        ctx.save_for_forward(h, weight)

    @staticmethod
    def jvp(ctx, dh, dweight, _dtype, _grad_clip):  # type: ignore[override]
        # A product is linear in either operand. grad_clip concerns gradients alone.
        h, weight = ctx.saved_tensors
        rounded = lambda t: t.to(ctx.dtype).to(t.dtype)
        parts = []
        if dh is not None:
            parts.append(multiply(rounded(dh), weight))
        if dweight is not None:
            parts.append(multiply(rounded(h), dweight))
        return sum(parts[1:], parts[0])


def sequence(
    cell: Cell,
    x: torch.Tensor,  # [B, T, G, N, D]
    weight: torch.Tensor,  # [G, N, D, D]
    bias: Optional[torch.Tensor],  # [R, N, D]
    state: Optional[torch.Tensor],  # [K, B, N, D]
    reset: Optional[torch.Tensor],  # [B, T]
    hold: Optional[torch.Tensor],  # [B, T]
    grad_clip: Optional[float],
    clip_state: Optional[float] = None,
    return_states: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
    """Runs `cell` over T: h [B, T, N, D], the last states [K, B, N, D] and, with `return_states`, the
    K - 1 other states of every step [B, T, N, D]. Every 16-bit operand is widened, so sums are in
    the state dtype."""
    B, _, G, N, D = x.shape
    dtype = state_dtype(x.dtype)
    w = weight.to(dtype)
    bias = x.new_zeros(cell.bias_rows, N, D, dtype=dtype) if bias is None else bias.to(dtype)
    states = tuple(x.new_zeros(cell.states, B, N, D, dtype=dtype) if state is None else state)
    transformed = is_transformed() or in_forward_mode()
    product = TransformableProduct if transformed else RecurrentProduct
    bound = {} if clip_state is None else {"clip": lambda s: s.clamp(-clip_state, clip_state)}
    outputs = []
    for t, row in enumerate(x.unbind(1)):  # the gradient of unbind is one stack, not T sums
        if reset is not None:
            cleared = reset[:, t, None, None]
            states = tuple(torch.where(cleared, 0.0, s) for s in states)
        r = list(product.apply(states[0], w, x.dtype, grad_clip))
        if cell.bias_rows > G:
            r[-1] = r[-1] + bias[G]
        gates = row.to(dtype).unbind(1)
        after = cell.step(tuple(gates[g] + bias[g] for g in range(G)), tuple(r), states, **bound)
        each = after
        if hold is not None:
            held = hold[:, t, None, None]
            after = tuple(torch.where(held, s, a) for s, a in zip(states, after))
            each = tuple(torch.where(held, 0.0, s) for s in each)
        states = after
        outputs.append((each[0].to(x.dtype), *(each[1:] if return_states else ())))
    if not outputs:
        none = x.new_zeros(cell.states - 1 if return_states else 0, B, 0, N, D, dtype=dtype)
        return x.new_zeros(B, 0, N, D), torch.stack(states), list(none)
    h, *each_other = (torch.stack(s, 1) for s in zip(*outputs))
    return h, torch.stack(states), each_other
