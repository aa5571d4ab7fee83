"""Runs a torch.nn LSTM, GRU or RNN on the functions of a kernel's module, here `kernel`:
`recurrent`, `recurrent_step`, `linear`, and the sizes in `CELLS`.

A *head* is one recurrence with its own input. The directions of a layer are the two heads of one
call, the second one's input flipped in time.

Shapes: B batch, T time, I input width, G gates, N heads, D hidden width, P output width (proj_size,
or D), K states. Documents of a PackedSequence lie in one row: then B is 1, and states have S rows.

With proj_size the recurrence stays in the hidden space: R h_p = R (W_hr h) = (R W_hr) h, so R W_hr
is the recurrent weight and W_hr is applied to all outputs at once. An initial h_p has no h that it
comes from: the first step reads R h_p as part of its input, and h begins empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .packed import Layout
from .padding import pad_rows, pad_units

States = tuple[Tensor, ...]  # K tensors [B, N, D], as the kernels have them

# Where the kernel's own product is faster than torch's batched one.
LINEAR_DEVICES = ("cpu",)


class Heads(NamedTuple):
    """The parameters of recurrences that run side by side."""

    w_ih: Tensor  # [N, G * D, I]
    w_hh: Tensor  # [G, N, D, D]
    bias: Tensor | None  # [R, N, D]
    w_hr: Tensor | None  # [N, P, D]
    w_h0: Tensor | None  # [N, G * D, P]: torch's w_hh where there is a w_hr


def make_heads(spec: Any, parameters: Sequence[Sequence[Tensor]], bias: bool) -> Heads:
    """Stacks torch's `parameters[n]` of each head n: w_ih, w_hh, b_ih and b_hh if `bias`, any w_hr."""
    G, N = spec.gates, len(parameters)
    columns = list(map(list, zip(*parameters)))
    w_ih, w_hh, w_hr, w_h0 = *map(_stack, columns[:2]), None, None
    if len(columns) % 2:
        w_hr, w_h0 = _stack(columns[-1]), w_hh
        w_hh = torch.bmm(w_h0, w_hr)
    D = w_hh.shape[1] // G

    def split(w: Tensor) -> Tensor:  # [N, G * D, ...] -> [G, N, D, ...]
        sizes = D, *w.shape[2:]
        return w.view(G, 1, *sizes) if N == 1 else w.view(N, G, *sizes).transpose(0, 1)

    rows = None
    if bias:  # summed in the states' dtype, in which the kernel adds them
        wide = torch.promote_types(columns[2][0].dtype, torch.float32)
        b_ih, b_hh = ([b.to(wide) for b in same] for same in columns[2:4])
        both = 2 * G - spec.bias_rows  # later rows are added to the recurrent product separately
        if both == G:
            rows = split(_stack(list(map(add, b_ih, b_hh))))
        else:
            i, h = split(_stack(b_ih)), split(_stack(b_hh))
            rows = torch.cat((add(i[:both], h[:both]), i[both:], h[both:]))
    return Heads(w_ih, split(w_hh), rows, w_hr, w_h0)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns a + b with two separate gradients: torch's sum gives both operands one tensor, and
    two parameters that reach it through views would share the memory of their gradients."""
    return a - b.neg()


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def project(kernel: Any, x: Tensor, weight: Tensor, precision: str = "highest") -> Tensor:
    """Head by head, x [N, ..., I] times weight [N, O, I] -> [N, ..., O]."""
    x, weight = pad_rows(x, weight)
    options = {"precision": precision} if precision != "highest" else {}
    if len(weight) == 1:
        x, w = x[0], weight[0]
        if x.dim() == 3 and x.transpose(0, 1).is_contiguous():  # time stays outermost in memory
            return kernel.linear(x.transpose(0, 1), w, **options).transpose(0, 1).unsqueeze(0)
        return kernel.linear(x, w, **options).unsqueeze(0)
    if x.device.type in LINEAR_DEVICES or (options and x.dtype == torch.float32):
        pairs = zip(x.unbind(), weight.unbind())
        return torch.stack([kernel.linear(*pair, **options) for pair in pairs])
    y = torch.bmm(x.flatten(1, -2), weight.to(x.dtype).mT)
    return y.view(*x.shape[:-1], y.shape[-1])


class Engine(NamedTuple):
    """The parts that all layers have in common."""

    kernel: Any
    cell: str
    layout: Layout
    options: dict[str, Any]
    width: int  # D

    def advance(self, heads: Heads, gates: Tensor, state: States | None) -> tuple[Tensor, States]:
        """Runs gates [N, B, T, G * D]; returns the outputs [N, B, T, P] and the last states."""
        G = self.kernel.CELLS[self.cell].gates
        x = gates.view(*gates.shape[:-1], G, gates.shape[-1] // G)
        x = x.permute(1, 2, 3, 0, 4)  # [B, T, G, N, D]
        weights = heads.w_hh, heads.bias
        if x.shape[1] == 1 and self.layout.cu_seqlens is None:
            h, state = self.kernel.recurrent_step(self.cell, x[:, 0], *weights, state)
            h = h.unsqueeze(1)
        else:
            lengths, cu_seqlens = self.layout.lengths, self.layout.cu_seqlens
            options = {**self.options, "lengths": lengths, "cu_seqlens": cu_seqlens}
            h, state = self.kernel.recurrent(self.cell, x, *weights, state, **options)
        return self.outputs(heads, h.permute(2, 0, 1, 3)), state

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return project(self.kernel, x, weight, self.options.get("precision", "highest"))

    def outputs(self, heads: Heads, h: Tensor) -> Tensor:  # [N, ..., D] -> [N, ..., P]
        return h if heads.w_hr is None else self.project(h, heads.w_hr)

    def enter(self, heads: Heads, hx: States, dtype: torch.dtype) -> tuple[States, Tensor | None]:
        """Converts torch's states of one layer, each [N, B, ...], to the kernel's. With projections
        it also returns their product for the gates of the first step, [N, B, G * D]."""
        state = tuple(s.transpose(0, 1) for s in hx)
        if heads.w_h0 is None:
            return tuple(pad_units(s, heads.w_hh.shape[-1]) for s in state), None
        state = state[0], pad_units(state[1], heads.w_hh.shape[-1])
        first = self.project(hx[0].to(dtype), heads.w_h0)
        return (torch.zeros_like(state[1]), *state[1:]), first

    def leave(self, heads: Heads, state: States) -> States:  # converts to torch's states
        h, *others = (s.transpose(0, 1) for s in state)
        h = self.outputs(heads, h)
        if heads.w_hr is None:
            h = h[..., : self.width]
        return h, *(s[..., : self.width] for s in others)

    def run_layers(
        self,
        layers: list[Heads],
        x: Tensor,  # [B, T, I]
        states: list[States] | None,
        firsts: list[Tensor | None] | None,  # as returned by `enter`
        dropout: float,
    ) -> tuple[Tensor, list[States]]:  # [B, T, N * P]
        """Runs one layer after the other."""
        lasts = []
        for number, heads in enumerate(layers):
            if number > 0 and dropout > 0:
                x = F.dropout(x, dropout)
            two = len(heads.w_ih) == 2
            xs = torch.stack((x, self.layout.flip(x))) if two else x.unsqueeze(0)
            gates = self.project(xs, heads.w_ih)
            first = firsts[number] if firsts else None
            if first is not None:
                gates[self.layout.first()] += first
            y, last = self.advance(heads, gates, states[number] if states else None)
            x = torch.cat((y[0], self.layout.flip(y[1])), -1) if two else y[0]
            lasts.append(last)
        return x, lasts
