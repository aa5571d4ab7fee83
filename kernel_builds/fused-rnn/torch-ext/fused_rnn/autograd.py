"""Fake implementations and gradients of the ops, for every cell in one loop.

The gates are either kept by the forward op (``save=True``) or computed again by the backward:
a forward op run with ``save=False`` is differentiable all the same.
"""

import torch

from ._ops import add_op_namespace_prefix, ops
from .cells import CELLS, Cell


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def register(cell: Cell) -> None:
    fwd, bwd = getattr(ops, f"{cell.name}_fwd"), getattr(ops, f"{cell.name}_bwd")

    @torch.library.register_fake(add_op_namespace_prefix(f"{cell.name}_fwd"))
    def _(x, weight, bias, state, reset, hold, lengths, cu_seqlens, grad_clip, save):
        B, T, _, N, D = x.shape
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = state_dtype(x.dtype)
        saved = (B, T, cell.saved, N, D) if save else (0,)
        return (
            x.new_empty(B, T, N, D),
            x.new_empty(cell.states, S, N, D, dtype=dtype),
            x.new_empty(saved, dtype=dtype),
            x.new_empty((B, T, N, D) if save else (0,)),
        )

    @torch.library.register_fake(add_op_namespace_prefix(f"{cell.name}_bwd"))
    def _(dh, dlast, saved, h_prev, weight, reset, hold, lengths, cu_seqlens, grad_clip):
        B, T, N, D = dh.shape
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = state_dtype(dh.dtype)
        separate = cell.bias_rows > cell.gates  # dr differs from dx
        return (
            dh.new_empty(B, T, cell.gates, N, D),
            dh.new_empty((B, T, cell.gates, N, D) if separate else (0,)),
            dh.new_empty(cell.bias_rows, N, D, dtype=dtype),
            dh.new_empty(cell.states, S, N, D, dtype=dtype),
        )

    def setup_context(ctx, inputs, output):
        x, weight, bias, state, *masks, grad_clip, save = inputs
        ctx.grad_clip, ctx.save, ctx.has = grad_clip, save, (bias is not None, state is not None)
        ctx.set_materialize_grads(False)
        kept = output[2:] if save else (x, bias, state)
        ctx.save_for_backward(weight, *masks, *kept)

    def backward(ctx, dh, dlast, _dsaved, _dh_prev):
        weight, reset, hold, lengths, cu_seqlens, *kept = ctx.saved_tensors
        if ctx.save:
            saved, h_prev = kept
        else:
            x, bias, state = kept
            masks = (reset, hold, lengths, cu_seqlens)
            _, _, saved, h_prev = fwd(x, weight, bias, state, *masks, ctx.grad_clip, True)
        if dh is None:
            dh = torch.zeros_like(h_prev)
        dx, dr, dbias, dstate = bwd(
            dh, dlast, saved, h_prev, weight, reset, hold, lengths, cu_seqlens, ctx.grad_clip
        )
        needs = ctx.needs_input_grad
        dweight = None
        if needs[1]:
            dweight = ops.recurrent_dweight(dr if dr.dim() == 5 else dx, h_prev)
        has_bias, has_state = ctx.has
        return (
            dx if needs[0] else None,
            dweight,
            dbias if has_bias else None,
            dstate if has_state else None,
            *(None,) * 6,
        )

    torch.library.register_autograd(
        add_op_namespace_prefix(f"{cell.name}_fwd"), backward, setup_context=setup_context
    )
    torch.library.register_autograd(
        add_op_namespace_prefix(f"{cell.name}_bwd"), _no_second_derivative
    )


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "fused_rnn has no second derivatives in its kernels: pass backend='reference', "
        "which autograd differentiates any number of times"
    )


@torch.library.register_fake(add_op_namespace_prefix("recurrent_dweight"))
def _(dr, h_prev):
    _, _, G, N, D = dr.shape
    return dr.new_empty(G, N, D, D)


@torch.library.register_fake(add_op_namespace_prefix("linear_fwd"))
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake(add_op_namespace_prefix("linear_bwd"))
def _(dy, x, weight, has_bias):
    dbias = weight.new_empty((weight.shape[0],) if has_bias else (0,))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _linear_setup_context(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx, dy):
    dx, dweight, dbias = ops.linear_bwd(dy, *ctx.saved_tensors, ctx.has_bias)
    return dx, dweight, dbias if ctx.has_bias else None


torch.library.register_autograd(
    add_op_namespace_prefix("linear_fwd"), _linear_backward, setup_context=_linear_setup_context
)
for _op in ("linear_bwd", "recurrent_dweight"):
    torch.library.register_autograd(add_op_namespace_prefix(_op), _no_second_derivative)
for _cell in CELLS.values():
    register(_cell)
