"""Gradients of c of every step, which flash_lstm's forward keeps for its backward.

Gradients dc of c take two ways into the backward. Along c they are a linear recurrence with known
coefficients,

    A[t] = dc[t] + k[t + 1] A[t + 1],        k = f + p_f df/d(pre-activation) (c - z),

which gives the gates f and z their gradients; o comes after c. Along h they are what those gates
pass to the h before the step, which the op's own backward takes as a part of dh. All steps are
computed at once, with one scan, and the op's backward runs once, as it does without dc.
"""

from typing import Any, NamedTuple, Sequence

import torch

from .arguments import sizes
from .cells import Cell
from .formulas import CALLS
from .marks import Masks, find_marks, shift
from .sequences import state_dtype


class Through(NamedTuple):
    """Gradients that reach the op's inputs, and its output h, by way of c."""

    dx: torch.Tensor  # [B, T, G, D] in the state dtype
    dh: torch.Tensor  # [B, T, D] in the state dtype
    dweight: torch.Tensor  # [P, D], with a bias [P + G, D]
    dstate: torch.Tensor  # [K, S, D]

    def add_to(self, dx: torch.Tensor) -> torch.Tensor:
        """Adds to dx in x's layout: [B, T, G, D], or in heads [N, B, T, G, D / N]."""
        own = self.dx
        if dx.dim() == 5:
            own = own.unflatten(-1, (dx.shape[0], dx.shape[-1])).movedim(-2, 0)
        return (dx + own).to(dx.dtype)


def scan_back(d: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # [B, T, D], both
    """Returns A with A[t] = d[t] + keep[t + 1] A[t + 1]."""
    return CALLS["scan_fwd"](shift(keep), d, None, True)


def through_states(
    cell: Cell,
    dsaved: torch.Tensor,
    inputs: Sequence[Any],
    kept: Sequence[torch.Tensor],
    masks: Masks,
) -> Through:
    """Takes the gradient of flash_lstm's `saved` [B, T, V, D], whose row 0 is c, to everything
    before it. `inputs` are x, weight and state, `kept` h and `saved`."""
    (x, weight, state), (h, saved) = inputs, kept
    B, T, D = sizes(x)
    dtype, marks = state_dtype(x.dtype), find_marks(h, masks, 1)
    sequences = B if masks[3] is None else len(masks[3]) - 1
    masked = lambda t: t if marks.held is None else torch.where(marks.held, 0.0, t)

    def before(k: int, after: torch.Tensor) -> torch.Tensor:
        """Returns state k before each step."""
        after = after.to(dtype)
        first = after.new_zeros(sequences, D) if state is None else state[k].to(dtype)
        if masks[3] is None:
            entered = torch.cat([first[:, None], after[:, :-1]], 1)[:, :T]
        else:
            late = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)
            entered = torch.where(marks.first, marks.given(first), late)
        return entered if marks.cleared is None else torch.where(marks.cleared, 0.0, entered)

    h_before = before(0, h if masks[1] is None else saved[:, :, cell.states - 1])
    c_before = before(1, saved[:, :, 0])
    rows = (
        x.unbind(-2) if x.dim() == 4 else [r.permute(1, 2, 0, 3).flatten(2) for r in x.unbind(-2)]
    )
    w, bias = weight.to(dtype), weight[cell.weights :].to(dtype)
    pre = [r.to(dtype) + (bias[g] if len(bias) else 0.0) for g, r in enumerate(rows)]
    f = torch.sigmoid(w[0] * h_before + w[3] * c_before + pre[0])
    z = torch.tanh(w[2] * h_before + pre[2])
    along_f = masked((c_before - z) * f * (1 - f))  # derivatives of c' by pre-activations
    along_z = masked((1 - f) * (1 - z * z))
    keep = marks.keep(f + along_f * w[3], 1.0)
    total = scan_back(masked(dsaved[:, :, 0].to(dtype)), torch.where(marks.first, 0.0, keep))
    df, dz = total * along_f, total * along_z
    dx = torch.stack([df, torch.zeros_like(df), dz], 2)
    dweight = torch.zeros_like(w)
    for row, product in ((0, df * h_before), (2, dz * h_before), (3, df * c_before)):
        dweight[row] = product.sum((0, 1))
    if len(bias):
        dweight[cell.weights :] = dx.sum((0, 1))
    entering, leaving = marks.leave(marks.keep(df * w[0] + dz * w[2], 0.0), scan_back)
    given = [marks.to_given(d, sequences) for d in (entering, keep * total)]
    return Through(dx, leaving, dweight, torch.stack(given))
