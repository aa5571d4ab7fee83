"""Registers fake implementations and gradients of the ops, for every cell in one loop.

The gates are either kept by the forward op (``save=True``) or recomputed by the backward: a
forward op that was run with ``save=False`` is differentiable too.
"""

from typing import Any, Tuple

import torch

from ._ops import BACKEND
from .backward import Clips, gradients
from .cells import CELLS, Cell
from .dispatch import without_autocast
from .formulas import CALLS, is_differentiated_again, refuse_second_derivative, register_fake
from .formulas import register as register_formula
from .second_derivatives import Gradients
from .sequences import state_dtype


def register(cell: Cell) -> None:
    fwd, bwd = f"{cell.name}_fwd", f"{cell.name}_bwd"

    @register_fake(fwd)
    def _(
        x, weight, bias, state, reset, hold, lengths, cu_seqlens, grad_clip, tf32, save,
        clip_state=None,
    ):  # fmt: skip
        B, T, _, N, D = x.shape
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = state_dtype(x.dtype)
        saved = (B, T, cell.saved, N, D) if save else (0,)
        return (
            x.new_empty(B, T, N, D),
            x.new_empty(cell.states, S, N, D, dtype=dtype),
            x.new_empty(saved, dtype=x.dtype if x.device.type == "cuda" else dtype),
            x.new_empty((B, T, N, D) if save else (0,)),
        )

    @register_fake(bwd)
    def _(
        dh, dlast, saved, h_prev, weight, reset, hold, lengths, cu_seqlens, grad_clip, tf32,
        wants_dweight, clip_state=None,
    ):  # fmt: skip
        B, T, N, D = dh.shape
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = state_dtype(dh.dtype)
        separate = cell.bias_rows > cell.gates  # dr differs from dx
        return (
            dh.new_empty(B, T, cell.gates, N, D),
            dh.new_empty((B, T, cell.gates, N, D) if separate else (0,)),
            dh.new_empty(cell.bias_rows, N, D, dtype=dtype),
            dh.new_empty(cell.states, S, N, D, dtype=dtype),
            weight.new_empty(weight.shape if wants_dweight else (0,)),
        )

    def setup_context(ctx, inputs, output):
        x, weight, bias, state, *masks = inputs[:8]
        grad_clip, ctx.tf32, ctx.save, *clip_state = inputs[8:]  # the last may be left out
        ctx.clips = Clips(grad_clip, clip_state[0] if clip_state else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.again = False
        ctx.set_materialize_grads(False)
        kept = output[2:] if ctx.save else (x, bias, state)
        ctx.save_for_backward(weight, *masks, *kept)

    def backward(ctx, dh, dlast, dsaved, dh_prev):
        weight, reset, hold, lengths, cu_seqlens, *kept = ctx.saved_tensors
        if ctx.save:
            saved, h_prev = kept
        else:
            x, bias, state = kept
            masks = (reset, hold, lengths, cu_seqlens)
            options: Tuple[Any, ...] = ctx.clips.gradient, ctx.tf32, True
            if ctx.clips.state is not None:
                options = *options, ctx.clips.state
            _, _, saved, h_prev = CALLS[fwd](x, weight, bias, state, *masks, *options)
        if dh is None:
            dh = torch.zeros_like(h_prev)
        needs = ctx.needs_input_grad
        given = dh, dlast, saved, h_prev, weight, reset, hold, lengths, cu_seqlens
        again = is_differentiated_again()
        if again:  # the node that made `saved` is this one, or that of the forward that ran above
            # Its dsaved and dh_prev come from Gradients then. A view leads to that node also if `saved` is
            # a tensor that torch.func.vjp has left; it has no node if vjp alone asked for gradients.
            node = saved.view_as(saved).grad_fn
            if node is not None:
                node.next_functions[0][0].again = True
        if again or ctx.again:
            dx, dweight, dbias, dstate = Gradients.apply(
                cell, ctx.clips, ctx.tf32, needs[1], dsaved, dh_prev, *given
            )
        else:
            dx, dweight, dbias, dstate = gradients(cell, given, ctx.clips, ctx.tf32, needs[1])
        return (
            dx if needs[0] else None,
            dweight,
            dbias.to(ctx.bias_dtype) if needs[2] else None,
            dstate if needs[3] else None,
            *(None,) * (len(needs) - 4),
        )

    register_formula(fwd, backward, setup_context)
    refuse_second_derivative("fused_rnn", bwd)


def register_block_step(cell: Cell) -> None:
    @register_fake(f"{cell.name}_block_step_")
    def _(
        x, mixer_norm, mixer_eps, in_proj, weight, bias, state, mlp_norm, mlp_eps, gate, up, down,
        scales,
    ):  # fmt: skip
        return x.new_empty(x.shape)


@register_fake("linear_fwd")
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@register_fake("linear_bwd")
def _(dy, x, weight, has_bias):
    dbias = weight.new_empty((weight.shape[0],) if has_bias else (0,))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _linear_setup_context(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx, dy):
    if is_differentiated_again():
        x, weight = ctx.saved_tensors
        with without_autocast(x.device.type):
            rows, columns = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            return dy @ weight, rows.mT @ columns, rows.sum(0) if ctx.has_bias else None
    dx, dweight, dbias = CALLS["linear_bwd"](dy, *ctx.saved_tensors, ctx.has_bias)
    return dx, dweight, dbias if ctx.has_bias else None


register_formula("linear_fwd", _linear_backward, _linear_setup_context)
refuse_second_derivative("fused_rnn", "linear_bwd")


if BACKEND == "cuda":

    @register_fake("tf32_matmul")
    def _(a, b):
        return a.new_empty(*a.shape[:2], b.shape[2])

    def _matmul_setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def _matmul_backward(ctx, dc):
        a, b = ctx.saved_tensors
        da = CALLS["tf32_matmul"](dc, b.mT) if ctx.needs_input_grad[0] else None
        db = CALLS["tf32_matmul"](a.mT, dc) if ctx.needs_input_grad[1] else None
        return da, db

    register_formula("tf32_matmul", _matmul_backward, _matmul_setup_context)

for _cell in CELLS.values():
    register(_cell)
    if BACKEND == "cpu":
        register_block_step(_cell)
