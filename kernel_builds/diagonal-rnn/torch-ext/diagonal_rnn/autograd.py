"""Registers fake implementations and gradients of the ops, for every cell in one loop.

A backward needs x, h and the states that the forward saved besides h. A forward op that was run
with ``save=False`` is differentiable too, because its backward runs it again. What is saved is an
output with a gradient: `return_states` gives it to the caller.
"""

import torch

from ._ops import BACKEND
from .all_states import through_states
from .arguments import sizes
from .cells import CELLS, Cell
from .conv_reference import convolve
from .formulas import (
    CALLS,
    gradients_by,
    is_differentiated_again,
    refuse_second_derivative,
    register_fake,
)
from .formulas import register as register_formula
from .reference import lower, sequence
from .sequences import state_dtype


def register(cell: Cell) -> None:
    fwd, bwd = f"{cell.name}_fwd", f"{cell.name}_bwd"

    @register_fake(fwd)
    def _(x, weight, state, reset, hold, lengths, cu_seqlens, method, tol, max_iters, save):
        B, T, D = sizes(x)
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        kept = cell.states - 1 + (hold is not None)
        return (
            x.new_empty(B, T, D),
            x.new_empty(cell.states, S, D, dtype=state_dtype(x.dtype)),
            x.new_empty((B, T, kept, D) if save else (0,)),
            x.new_empty(3, dtype=torch.float32),
        )

    @register_fake(bwd)
    def _(dh, dlast, x, weight, h, saved, state, reset, hold, lengths, cu_seqlens, method):
        B, _, D = sizes(x)
        S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            weight.new_empty(cell.states, S, D),
        )

    def setup_context(ctx, inputs, output):
        *tensors, ctx.method, ctx.tol, ctx.max_iters, ctx.save = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(output[0:3:2] if ctx.save else ()))

    def backward(ctx, dh, dlast, dsaved, _dreport):
        everything = ctx.saved_tensors  # read once: checkpointing recomputes at each access
        tensors, kept = everything[:7], everything[7:]
        x, weight, state, *masks = tensors
        if not ctx.save:  # it is empty
            dsaved = None
        if is_differentiated_again():

            def run(x, weight, state):
                lowered, weights = lower(cell, x, weight, masks)
                given = lowered.x, weights, state, lowered.reset, lowered.hold
                h, last, others = sequence(cell, *given, return_states=True)
                return (lowered.unpack(h).to(x.dtype), last, *map(lowered.unpack, others))

            dothers = [None] * (cell.states - 1) if dsaved is None else dsaved.unbind(2)
            grads = dh, dlast, *dothers[: cell.states - 1]
            return *gradients_by(run, (x, weight, state), grads), *(None,) * 8
        if not ctx.save:
            h, _, saved, _ = CALLS[fwd](*tensors, ctx.method, ctx.tol, ctx.max_iters, True)
            kept = h, saved
        dh, extra = torch.zeros_like(kept[0]) if dh is None else dh, None
        if dsaved is not None and cell.states > 1:
            extra = through_states(cell, dsaved, (x, weight, state), kept, tuple(masks))
            dh = (dh + extra.dh).to(dh.dtype)
        dx, dweight, dstate = CALLS[bwd](dh, dlast, x, weight, *kept, state, *masks, ctx.method)
        if extra is not None:
            dx, dweight, dstate = extra.add_to(dx), dweight + extra.dweight, dstate + extra.dstate
        return dx, dweight, None if state is None else dstate, *(None,) * 8

    register_formula(fwd, backward, setup_context)
    refuse_second_derivative("diagonal_rnn", bwd)


def differentiable_gradients(fwd: str, dh, a, h, h0, reverse: bool):
    """Returns da, db, dh0 of a scan, by a scan the other way: l_t = dh_t + a_{t+1}^T l_{t+1},
    da_t = l_t h_{t-1}^T, db = l. It is differentiable, as h is, which the forward returned."""
    if h.shape[1] == 0:
        return torch.zeros_like(a), dh, None if h0 is None else torch.zeros_like(h0)
    block = a.dim() > h.dim()
    first, end = (-1, 0) if reverse else (0, -1)
    start = torch.zeros_like(h[:, first]) if h0 is None else h0.to(h.dtype)
    towards = lambda one, t: torch.cat([one[:, None], t[:, :-1]], 1)
    away = lambda one, t: torch.cat([t[:, 1:], one[:, None]], 1)
    nothing = torch.zeros_like(a[:, end])
    before = away(start, h) if reverse else towards(start, h)
    after = towards(nothing, a) if reverse else away(nothing, a)
    found = CALLS[fwd](after.mT if block else after, dh, None, not reverse)
    if block:
        da = found[..., None] * before[..., None, :]
        dh0 = (a[:, first].mT @ found[:, first, ..., None]).squeeze(-1)
    else:
        da, dh0 = found * before, a[:, first] * found[:, first]
    return da.to(a.dtype), found, None if h0 is None else dh0.to(h0.dtype)


def register_scan(name: str) -> None:
    fwd, bwd = f"{name}_fwd", f"{name}_bwd"

    @register_fake(fwd)
    def _(a, b, h0, reverse):
        return b.new_empty(b.shape)

    @register_fake(bwd)
    def _(dh, a, h, h0, reverse):
        first = h.shape[:1] + h.shape[2:]
        dh0 = h.new_empty(first, dtype=state_dtype(h.dtype))
        return a.new_empty(a.shape), h.new_empty(h.shape), dh0

    def setup_context(ctx, inputs, output):
        a, _, h0, ctx.reverse = inputs
        ctx.save_for_backward(a, output, h0)

    def backward(ctx, dh):
        a, h, h0 = ctx.saved_tensors
        if is_differentiated_again():
            return *differentiable_gradients(fwd, dh, a, h, h0, ctx.reverse), None
        da, db, dh0 = CALLS[bwd](dh, a, h, h0, ctx.reverse)
        return da, db, None if h0 is None else dh0, None

    register_formula(fwd, backward, setup_context)
    refuse_second_derivative("diagonal_rnn", bwd)


def register_conv() -> None:
    fwd, bwd = "causal_conv_fwd", "causal_conv_bwd"

    @register_fake(fwd)
    def _(x, weight, window, reset, silu):
        return x.new_empty(x.shape)

    @register_fake(bwd)
    def _(dy, x, weight, window, reset, silu):
        B, _, D = x.shape
        return (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            x.new_empty(B, weight.shape[0] - 2, D),
        )

    def setup_context(ctx, inputs, output):
        *tensors, ctx.silu = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx, dy):
        x, weight, window, reset = ctx.saved_tensors
        if is_differentiated_again():
            run = lambda x, rows, window: (
                convolve(x, rows[:-1].mT, rows[-1], window, reset, ctx.silu),
            )
            return *gradients_by(run, (x, weight, window), (dy,)), None, None
        dx, dweight, dwindow = CALLS[bwd](dy, x, weight, window, reset, ctx.silu)
        return dx, dweight, None if window is None else dwindow, None, None

    register_formula(fwd, backward, setup_context)
    refuse_second_derivative("diagonal_rnn", bwd)


def register_steps() -> None:
    @register_fake("conv_step_")
    def _(x, weight, bias, window):
        return x.new_empty(x.shape)

    for cell in CELLS:

        @register_fake(f"{cell}_mix_step_")
        def _(u, a, p, bias, h, c, x, skip, gate, bound):
            return x.new_empty(x.shape)


for _cell in CELLS.values():
    register(_cell)
for _scan in ("scan", "block_scan"):
    register_scan(_scan)
register_steps()
if BACKEND == "cuda":
    register_conv()
