"""The states of every step, beside h: c of lstm; c, n and m of slstm.

What the forward keeps for its backward tells c and n: c' = f c + i g, from the gates and the c before
the step. m is a running maximum of the gates, which are computed again. Gradients dc of these states
take two ways into the backward. Along c they are a linear recurrence with known coefficients,

    A[t] = dc[t] + f[t + 1] A[t + 1],

which gives the gates their gradients. Through the recurrent product it is weight^T of those, which
the op's own backward takes as a part of dh. Both are computed for all steps at once, by `scan_back`,
and the op's backward runs once, as it does without dc.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from .backward import Clips, gradients
from .cells import CELLS, Cell
from .dispatch import without_autocast
from .formulas import CALLS
from .marks import Marks, Masks, find_marks, shift
from .sequences import state_dtype


def scan_back(d: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # [B, T, N, D], both
    """Returns A with A[t] = d[t] + keep[t + 1] A[t + 1]; a keep of 0 also stops infinity and NaN."""
    if d.device.type != "cpu" or not d.shape[1]:
        return scan_in_rounds(d, keep)
    ds, keeps = d.unbind(1), keep.unbind(1)
    found = [ds[-1]]
    for t in range(len(ds) - 2, -1, -1):
        through = torch.addcmul(ds[t], keeps[t + 1], found[-1])
        found.append(torch.where(keeps[t + 1] == 0, ds[t], through))
    return torch.stack(found[::-1], 1)


def scan_in_rounds(d: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Does what scan_back does in log2(T) rounds, each of which doubles the number of terms that are
    summed: on a GPU, launches for every step would take longer."""
    keep, reach = torch.cat([keep[:, 1:], torch.zeros_like(keep[:, :1])], 1), 1
    while reach < d.shape[1]:
        near, cut = keep[:, :-reach], keep[:, :-reach] == 0
        passed = torch.where(cut, 0.0, near * d[:, reach:])
        d = torch.cat([d[:, :-reach] + passed, d[:, -reach:]], 1)
        near = torch.where(cut, 0.0, near * keep[:, reach:])
        keep = torch.cat([near, keep[:, -reach:]], 1)
        reach *= 2
    return d


def running_maximum(new: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # [B, T, N, D], both
    """Returns m with m[t] = max(new[t], gain[t] + m[t - 1]), and m[0] = new[0]; a gain of -infinity
    also stops NaN."""
    reach = 1
    while reach < new.shape[1]:
        near, late = new[:, reach:], gain[:, reach:]
        cut = late == -torch.inf
        far = torch.where(cut, near, torch.maximum(near, late + new[:, :-reach]))
        new = torch.cat([new[:, :reach], far], 1)
        late = torch.where(cut, late, late + gain[:, :-reach])
        gain = torch.cat([gain[:, :reach], late], 1)
        reach *= 2
    return new


def stabiliser(cell_inputs: Any, n: torch.Tensor, h_prev: torch.Tensor, marks: Marks):
    """Returns sLSTM's m of every step; n [B, T, N, D] is that before the step."""
    x, weight, bias, state = cell_inputs
    previous, rows = h_prev.to(n.dtype), weight[:2].to(n.dtype)  # of the gates i and f
    pre = x[:, :, :2].to(n.dtype) + torch.einsum("btnk,gnjk->btgnj", previous, rows)
    i, f = (pre if bias is None else pre + bias[:2]).unbind(2)
    log_f, empty = F.logsigmoid(f), n == 0
    new, gain = i, torch.where(empty, -torch.inf, log_f)
    before = torch.full_like(i, -torch.inf) if state is None else marks.given(state[3])
    new = torch.where(marks.first & ~empty, torch.maximum(i, log_f + before), new)
    if marks.held is not None:
        passed = torch.where(marks.first, before, -torch.inf)
        new, gain = torch.where(marks.held, passed, new), torch.where(marks.held, 0.0, gain)
    return running_maximum(new, torch.where(marks.first, -torch.inf, gain))


class AllStates(torch.autograd.Function):
    """Runs a cell's ops: h, the last states, and the states of every step but h, in the state
    dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        cell: str, x, weight, bias, state, reset, hold, lengths, cu_seqlens, clip, tf32, clip_state
    ):
        masks = reset, hold, lengths, cu_seqlens
        run = CALLS[f"{cell}_fwd"]
        options = (clip, tf32, True) if clip_state is None else (clip, tf32, True, clip_state)
        h, last, saved, h_prev = run(x, weight, bias, state, *masks, *options)
        marks, values = find_marks(x, masks), saved.to(state_dtype(x.dtype)).unbind(2)
        if cell == "lstm":
            i, f, g, _, c = values
            c = f * c + i * g
            states = [c if clip_state is None else c.clamp(-clip_state, clip_state)]
        else:
            a, b, z, _, _, c, n = values
            with without_autocast(x.device.type):
                m = stabiliser((x, weight, bias, state), n, h_prev, marks)
            states = [a * c + b * z, a * n + b, m]
        if marks.held is not None:
            states = [torch.where(marks.held, 0.0, s) for s in states]
        return (h, last, saved, h_prev, *states)

    @staticmethod
    def setup_context(ctx, inputs, output):
        cell, _, weight, bias, _, *masks, clip, ctx.tf32, clip_state = inputs
        ctx.clips = Clips(clip, clip_state)
        _, _, saved, h_prev, *states = output
        ctx.cell, ctx.bias_dtype = CELLS[cell], None if bias is None else bias.dtype
        ctx.save_for_backward(weight, saved, h_prev, *masks)
        detached = states[len(states) - ctx.cell.detached_states :]
        # `saved` stays attached, so that the op below sees a second derivative and refuses it.
        ctx.mark_non_differentiable(*detached)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dh, dlast, _saved, _h_prev, *dstates):
        weight, saved, h_prev, *masks = ctx.saved_tensors
        dstates = dstates[: ctx.cell.states - 1 - ctx.cell.detached_states]
        extra = None
        if any(d is not None for d in dstates):
            given = ctx.cell, ctx.clips, dstates, None
            with without_autocast(weight.device.type):
                extra = through_states(*given, weight, saved, h_prev, tuple(masks))
            dh = (extra.dh if dh is None else dh + extra.dh).to(h_prev.dtype)
        elif dh is None:
            dh = torch.zeros_like(h_prev)
        needs = ctx.needs_input_grad[1:5]
        given = dh, dlast, saved, h_prev, weight, *masks
        dx, dweight, dbias, dstate = gradients(ctx.cell, given, ctx.clips, ctx.tf32, needs[1])
        if extra is not None:
            dx, dbias = extra.add_to(dx, dbias)
            dstate = dstate + extra.dstate
            dweight = None if dweight is None else dweight + extra.dweight
        results = dx, dweight, None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype), dstate
        return None, *(d if need else None for d, need in zip(results, needs)), *(None,) * 7


class Sources(NamedTuple):
    """Gradients of what enters each step, beside those of its outputs; None for zero."""

    pre: Optional[torch.Tensor]  # [B, T, R, N, D]: pre-activations; GRU's last row is R_n h + b_nh
    states: Optional[Sequence[torch.Tensor]]  # [B, T, N, D] each: c, n before the step
    h: Optional[torch.Tensor]  # [B, T, N, D]: h before the step


class Through(NamedTuple):
    """Gradients that reach the op's inputs, and its outputs h, by way of states and sources."""

    dx: torch.Tensor  # [B, T, R, N, D] in the state dtype: those of all pre-activations
    dh: torch.Tensor  # [B, T, N, D] in the state dtype
    dweight: torch.Tensor  # [G, N, D, D]
    dstate: torch.Tensor  # [K, S, N, D]

    def add_to(self, dx: torch.Tensor, dbias: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        own = self.dx[:, :, : dx.shape[2]]
        return (dx + own).to(dx.dtype), dbias + self.dx.sum((0, 1))


def through_states(
    cell: Cell, clips: Clips, dstates: Sequence[Optional[torch.Tensor]],
    sources: Optional[Sources], weight: torch.Tensor, saved: torch.Tensor, h_prev: torch.Tensor,
    masks: Masks,
) -> Through:  # fmt: skip
    """Takes `dstates`, of c and n after each step, and `sources` to everything before them."""
    if clips.gradient not in (None, 0.0):
        raise RuntimeError(
            f"grad_clip is {clips.gradient}, but must be None or 0 for gradients of the states that "
            "return_states gives: pass backend='reference', or take gradients of h alone"
        )
    marks, dtype = find_marks(h_prev, masks), state_dtype(h_prev.dtype)
    wide = lambda d: None if d is None else d.to(dtype)
    kept = saved.to(dtype)
    if marks.held is not None:  # what is saved there is not defined
        kept = torch.where(marks.held[:, :, None], 0.0, kept)
    values = kept.unbind(2)
    carried = cell.states - cell.detached_states
    forget = values[1] if cell.name == "lstm" else values[0]
    inside = None  # where c is not clipped; a clipped one passes no gradient on
    if cell.name == "lstm" and clips.state is not None:
        inside = (forget * values[4] + values[0] * values[2]).abs() <= clips.state
    keep = marks.keep(forget, 1.0)
    sequences = len(h_prev) if masks[3] is None else len(masks[3]) - 1
    dstate = forget.new_zeros(cell.states, sequences, *h_prev.shape[2:])
    after: List[torch.Tensor] = []  # gradients of c, n after each step
    for k in range(1, carried):
        d = wide(dstates[k - 1]) if dstates else None
        d = torch.zeros_like(forget) if d is None else d
        d = d if marks.held is None else torch.where(marks.held, 0.0, d)
        if sources is not None and sources.states is not None:
            entering = marks.keep(sources.states[k - 1].to(dtype), 0.0)
            d = d + shift(torch.where(marks.first, 0.0, entering))
            dstate[k] = marks.to_given(entering, sequences)
        gain = torch.where(marks.first, 0.0, keep)
        if inside is not None:  # of the step before, through which the gradient would go
            d = torch.where(inside, d, 0.0)
            gain = torch.where(torch.cat([inside[:, :1], inside[:, :-1]], 1), gain, 0.0)
        after.append(scan_back(d, gain))
        dstate[k] += marks.to_given(keep * after[-1], sequences)
    if cell.name == "lstm":
        i, f, g, _, c = values
        (dc,) = after
        gates = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g)]
    elif cell.name == "slstm":
        _, b, z, _, f, c, n = values
        dc, dn = after
        gates = [(dc * z + dn) * b, (dc * c + dn * n) * values[0] * (1 - f), dc * b * (1 - z * z)]
    else:
        gates = []  # no state but h
    while len(gates) < cell.bias_rows:  # the output gate comes after the states
        gates.append(torch.zeros_like(forget))
    dx = torch.stack(gates, 2)
    if sources is not None and sources.pre is not None:
        dx = dx + sources.pre
    if marks.held is not None:
        dx = torch.where(marks.held[:, :, None], 0.0, dx)
    dr = dx if cell.bias_rows == cell.gates else dx[:, :, [*range(cell.gates - 1), -1]]
    # The products are in the state dtype: the op's backward rounds its own part of the same sums.
    previous = h_prev.to(dtype)
    dweight = torch.einsum("btgnj,btnk->gnjk", dr, previous).to(weight.dtype)
    # The gradient of the h that enters a step, and from it that of the h that left the step before.
    entering = torch.zeros_like(previous)
    if clips.gradient is None:
        entering = torch.einsum("btgnj,gnjk->btnk", dr, weight.to(dtype))
    if sources is not None and sources.h is not None:
        entering = entering + sources.h
    entering, leaving = marks.leave(marks.keep(entering, 0.0), scan_back)
    dstate[0] = marks.to_given(entering, sequences)
    return Through(dx, leaving, dweight, dstate)
