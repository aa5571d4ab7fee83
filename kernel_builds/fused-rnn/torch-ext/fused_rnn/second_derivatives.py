"""Gradients of the cells' ops that are differentiable once more (create_graph=True).

Gradients are linear in dh and dlast, so they have a transpose: with tangents u of x, U of weight, v of
bias and w of the first states, the tangents of the states run forward in time,

    dpre[t] = u[t] + v + U h[t - 1] + R ds_h[t - 1]
    ds[t]   = (step's derivative by pre) dpre[t] + (by the states before it) ds[t - 1],  ds[-1] = w,

and ds is what belongs to dh and dlast. What belongs to the gates and states that the forward kept are
second derivatives of one step, weighted with the gradients of the states after it. They enter the
forward's own gradient a second time, as gradients of pre-activations and of states before a step, in
the places of `saved` and `h_prev` (see `pack`). Only the tangents are a loop over time.
"""

from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from .all_states import Sources, scan_back, through_states
from .backward import Clips, gradients
from .cells import Cell
from .kept_steps import STEPS, Tensors, slopes_of
from .marks import Marks, find_marks, shift
from .sequences import state_dtype


class Step(NamedTuple):
    """All steps at once, differentiable. [B, T, N, D] each."""

    pre: List[torch.Tensor]  # R pre-activations: leaves
    before: List[torch.Tensor]  # states that carry gradients: leaves
    after: Tensors


def take_step(cell: Cell, kept: Tensors, h_prev: torch.Tensor) -> Step:
    carried = cell.states - cell.detached_states
    pre = [torch.zeros_like(kept[0]).requires_grad_() for _ in range(cell.bias_rows)]
    before = [h_prev, *kept[cell.saved - carried + 1 :]] if carried > 1 else [h_prev]
    if cell.name == "gru":
        before = [kept[4]]  # h before the step, not rounded
    before = [s.detach().requires_grad_() for s in before]
    return Step(pre, before, STEPS[cell.name](pre, kept, before))


def pack(cell: Cell, pre: Tensors, before: Tensors, like: torch.Tensor) -> torch.Tensor:
    """Returns gradients of pre-activations and of c, n before each step in the shape of `saved`: the
    former come first, the latter last."""
    places = torch.zeros(like.shape, dtype=pre[0].dtype, device=like.device)
    places[:, :, : len(pre)] = torch.stack(tuple(pre), 2)
    if before:
        places[:, :, cell.saved - len(before) :] = torch.stack(tuple(before), 2)
    return places.to(like.dtype)


def unpack(cell: Cell, places: Optional[torch.Tensor], h: Optional[torch.Tensor]) -> Sources:
    states = cell.states - 1 - cell.detached_states
    if places is None:
        return Sources(None, None, h)
    before = places[:, :, cell.saved - states :].unbind(2) if states else None
    return Sources(places[:, :, : cell.bias_rows], before, h)


NO_THIRD = (
    "fused_rnn has no third derivatives, nor torch.autograd.functional.hvp, which takes three (vhp and "
    "torch.func.jvp of torch.func.grad take two): pass backend='reference', which autograd "
    "differentiates any number of times"
)


class Last(torch.autograd.Function):
    """Returns the first `count` tensors, results of the others, with a gradient that raises."""

    @staticmethod
    def forward(ctx, count: int, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_THIRD)


class Gradients(torch.autograd.Function):
    """`backward.gradients`, with its own gradient. dsaved and dh_prev are what `pack` returned."""

    @staticmethod
    def forward(ctx, cell: Cell, clips: Clips, tf32, wants_dweight, dsaved, dh_prev, *given):
        dh, dlast, saved, h_prev, weight, *masks = given
        extra = None
        if dsaved is not None or dh_prev is not None:
            sources = unpack(cell, dsaved, dh_prev)
            extra = through_states(cell, clips, (), sources, weight, saved, h_prev, tuple(masks))
            dh = (dh + extra.dh).to(h_prev.dtype)
        given = dh, dlast, saved, h_prev, weight, *masks
        dx, dweight, dbias, dstate = gradients(cell, given, clips, tf32, wants_dweight)
        ctx.cell, ctx.clips, ctx.third = cell, clips, extra is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dx, *given)
        if extra is not None:
            dx, dbias = extra.add_to(dx, dbias)
            dstate = dstate + extra.dstate
            dweight = None if dweight is None else dweight + extra.dweight
        return dx, dweight, dbias, dstate

    @staticmethod
    def backward(ctx, u, dweight, dbias, dstate):
        if ctx.third:
            raise RuntimeError(NO_THIRD)
        if ctx.cell.name not in STEPS:
            raise RuntimeError(
                f"fused_rnn has no second derivatives of {ctx.cell.name}, which has no step in "
                "kept_steps.py: pass backend='reference'"
            )
        for name, clip in zip(("grad_clip", "clip_state"), ctx.clips):
            if clip is not None:
                raise RuntimeError(
                    f"{name} is {clip}, but must be None for second derivatives: pass "
                    "backend='reference'"
                )
        tensors, given = ctx.saved_tensors, (u, dweight, dbias, dstate)
        with torch.no_grad():
            results = transpose(ctx.cell, tensors, *given)
        if torch.is_grad_enabled():
            there = [r for r in results if r is not None]
            computed = iter(Last.apply(len(there), *there, *given, *tensors))
            results = tuple(None if r is None else next(computed) for r in results)
        return *(None,) * 6, *results, *(None,) * 4


def transpose(
    cell: Cell, tensors: Tuple[Any, ...], u: Optional[torch.Tensor], U: Optional[torch.Tensor],
    v: Optional[torch.Tensor], w: Optional[torch.Tensor],
) -> Tuple[Optional[torch.Tensor], ...]:  # fmt: skip
    """Returns what belongs to dh, dlast, saved, h_prev and weight."""
    dx, dh, dlast, saved, h_prev, weight, *masks = tensors
    dtype, marks = state_dtype(h_prev.dtype), find_marks(h_prev, tuple(masks))
    kept = saved.detach().to(dtype)
    if marks.held is not None:  # what is saved there is not defined; any values that divide will do
        kept = torch.where(marks.held[:, :, None], 1.0, kept)
    previous, R = h_prev.detach().to(dtype), weight.detach().to(dtype)
    kept = kept.unbind(2)
    with torch.enable_grad():
        step = take_step(cell, kept, previous)
    dr = recurrent_part(cell, dx.detach().to(dtype), kept, marks)
    ds = after_each_step(cell, step, dh, dlast, dr, R, marks, masks[3])
    tangents = run_tangents(cell, step, previous, R, (u, U, v, w), marks, masks[3])
    leaves = [*step.pre, *step.before]
    with torch.enable_grad():
        first = torch.autograd.grad(step.after, leaves, ds, create_graph=True, allow_unused=True)
        along = [*tangents.pre.unbind(2), *tangents.before]
        pairs = [(g, d) for g, d in zip(first, along) if g is not None and g.requires_grad]
        weighted = R.new_zeros(())
        for g, d in pairs:
            weighted = weighted + (g * d).sum()
    second: List[torch.Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if pairs:
        found = torch.autograd.grad(weighted, leaves, allow_unused=True)
        second = [s if g is None else g for g, s in zip(found, second)]
    if marks.held is not None:
        second = [torch.where(marks.held, 0.0, s) for s in second]
    pre, (of_h, *of_others) = second[: len(step.pre)], second[len(step.pre) :]
    if U is not None:
        of_h = of_h + torch.einsum("btgnj,gnjk->btnk", dr, U.to(dtype))
    dweight = torch.einsum("btgnj,btnk->gnjk", dr, tangents.before[0]).to(weight.dtype)
    return (
        tangents.h.to(dh.dtype),
        None if dlast is None else tangents.last.to(dlast.dtype),
        pack(cell, pre, of_others, saved),
        of_h.to(h_prev.dtype),
        dweight,
    )


def recurrent_part(cell: Cell, dx: torch.Tensor, kept: Tensors, marks: Marks) -> torch.Tensor:
    """Returns the gradients of the recurrent products from those of x, [B, T, G, N, D] both."""
    if marks.held is not None:
        dx = torch.where(marks.held[:, :, None], 0.0, dx)
    if cell.bias_rows == cell.gates:
        return dx
    reset, z, n = dx.unbind(2)  # GRU's reset gate multiplies the last product
    return torch.stack([reset, z, n * kept[0]], 2)


def last_steps(like: torch.Tensor, cu_seqlens: Optional[torch.Tensor]) -> Tuple[Any, Any, Any]:
    """Returns the rows and the times at which sequences end, and which sequences have steps."""
    if cu_seqlens is None:
        count = like.shape[0] if like.shape[1] else 0
        rows = torch.arange(count, device=like.device)
        return rows, torch.full_like(rows, like.shape[1] - 1), slice(count)
    cuts = cu_seqlens.long()
    some = (cuts[1:] > cuts[:-1]).nonzero().flatten()
    return torch.zeros_like(some), cuts[1:][some] - 1, some


def after_each_step(
    cell: Cell, step: Step, dh: torch.Tensor, dlast: Optional[torch.Tensor], dr: torch.Tensor,
    R: torch.Tensor, marks: Marks, cu_seqlens: Optional[torch.Tensor],
) -> List[torch.Tensor]:  # fmt: skip
    """Returns the gradients of the states after each step; 0 at held steps."""
    rows, times, some = last_steps(dh, cu_seqlens)
    product = torch.einsum("btgnj,gnjk->btnk", dr, R)
    found: List[torch.Tensor] = []
    for k, before in enumerate(step.before):
        entering = product if k == 0 else torch.zeros_like(product)
        gain = torch.zeros_like(product)
        for j, after in enumerate(step.after[: k + 1]):
            options: Any = {"retain_graph": True, "allow_unused": True}
            (slope,) = torch.autograd.grad(after, before, torch.ones_like(after), **options)
            if slope is None:
                continue
            if j < k:
                entering = entering + slope * found[j]
            else:
                gain = slope
        entering = torch.where(marks.first, 0.0, marks.keep(entering, 0.0))
        d = shift(entering)
        if k == 0:
            own = dh.detach().to(d.dtype)
            d = d + (own if marks.held is None else torch.where(marks.held, 0.0, own))
        if dlast is not None:
            d[rows, times] += dlast[k][some].to(d.dtype)
        d = scan_back(d, torch.where(marks.first, 0.0, marks.keep(gain, 1.0)))
        found.append(d if marks.held is None else torch.where(marks.held, 0.0, d))
    return found


class Tangents(NamedTuple):
    pre: torch.Tensor  # [B, T, R, N, D]
    before: List[torch.Tensor]  # K of [B, T, N, D]: of the states before each step
    h: torch.Tensor  # [B, T, N, D]: of the outputs
    last: torch.Tensor  # [K, S, N, D]: of the last states; 0 where they carry no gradient


def run_tangents(
    cell: Cell, step: Step, h_prev: torch.Tensor, R: torch.Tensor, given: Tuple[Any, ...],
    marks: Marks, cu_seqlens: Optional[torch.Tensor],
) -> Tangents:  # fmt: skip
    """Runs the tangents forward in time; `given` are u, U, v, w of the module's equations."""
    u, U, v, w = given
    B, T, N, D = h_prev.shape
    dtype, G, K = h_prev.dtype, cell.gates, len(step.before)
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    base = h_prev.new_zeros(B, T, cell.bias_rows, N, D)
    products = [*range(G - 1), cell.bias_rows - 1]  # rows to which the recurrent products are added
    if u is not None:
        base[:, :, :G] += u.to(dtype)
    if v is not None:
        base += v.to(dtype)
    if U is not None:
        base[:, :, products] += torch.einsum("gnjk,btnk->btgnj", U.to(dtype), h_prev)
    slopes = [slopes_of(after, [*step.pre, *step.before]) for after in step.after]
    zeros = [h_prev.new_zeros(S, N, D) for _ in step.before]
    given_states = zeros if w is None else w[:K].to(dtype)
    starts = marks.first.squeeze(-1).unbind(1)  # T times [B, 1, 1]
    begins = [False] * T if cu_seqlens is None else marks.first.flatten(2).any(2).any(0).tolist()
    s = [*given_states] if cu_seqlens is None else [h_prev.new_zeros(B, N, D)] * K
    all_pre, all_before, all_after = [], [], []
    for t in range(T):
        if begins[t]:
            first = (g[marks.sequence[:, t]] for g in given_states)
            s = [torch.where(starts[t], g, old) for g, old in zip(first, s)]
        if marks.cleared is not None:
            s = [torch.where(marks.cleared[:, t], 0.0, old) for old in s]
        pre = add_product(base[:, t], s[0], R)
        all_before.append(s)
        all_pre.append(pre)
        along = [*pre.unbind(1), *s]
        new = []
        for terms in slopes:
            (k, slope), *others = terms
            total = slope[t] * along[k]
            for k, slope in others:
                total = torch.addcmul(total, slope[t], along[k])
            new.append(total)
        if marks.held is not None:
            new = [torch.where(marks.held[:, t], old, n) for old, n in zip(s, new)]
        s = new
        all_after.append(s)
    last = h_prev.new_zeros(cell.states, S, N, D)
    last[:K] = torch.stack([*given_states])  # of sequences without a step
    if not all_after:
        return Tangents(base, [h_prev] * K, h_prev, last)
    after = [torch.stack(each, 1) for each in zip(*all_after)]
    rows, times, some = last_steps(h_prev, cu_seqlens)
    for k, each in enumerate(after):
        last[k, some] = each[rows, times]
    h = after[0] if marks.held is None else torch.where(marks.held, 0.0, after[0])
    return Tangents(torch.stack(all_pre, 1), [torch.stack(b, 1) for b in zip(*all_before)], h, last)


def add_product(base: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns base [B, R, N, D] + weight h: h [B, N, D]; of GRU's R = 4 rows the third has none."""
    (B, N, D), G = h.shape, len(weight)
    if N == 1:
        r = (h.view(B, D) @ weight.reshape(G * D, D).mT).view(B, G, 1, D)
    else:
        heads = weight.permute(1, 3, 0, 2).reshape(N, D, G * D)
        r = torch.bmm(h.transpose(0, 1), heads).view(N, B, G, D).permute(1, 2, 0, 3)
    if base.shape[1] > G:
        r = torch.cat([r[:, :-1], torch.zeros_like(r[:, :1]), r[:, -1:]], 1)
    return base + r
