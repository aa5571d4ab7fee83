"""CPU benchmark cases of fused_rnn: shapes, our provider, torch's, and their cost."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from bench.suites.fused_rnn.case import Case
from flashcell.kernels import fused_rnn as reference

CELLS = reference.CELLS
TORCH_MODULES = {
    "lstm": (torch.nn.LSTM, {}),
    "gru": (torch.nn.GRU, {}),
    "rnn_tanh": (torch.nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (torch.nn.RNN, {"nonlinearity": "relu"}),
}


def _case(name: str, cell: str, shape: str, dtype: str, peer: str, required=None) -> Case:
    """Makes a case from a shape such as "b16 t256 1x768"."""
    batch, steps, heads, width = map(int, re.findall(r"\d+", shape))
    form = "linear" if steps > 1 else "linear-step"
    return Case(
        name, cell, batch, steps, heads, width, form, dtype, peers=(peer,), required=required
    )


CASES = [
    _case("lstm-b16", "lstm", "b16 t256 1x768", "float32", "torch", 0.95),
    _case("gru-b16", "gru", "b16 t256 1x768", "float32", "torch", 1.7),
    _case("lstm-b1", "lstm", "b1 t256 1x768", "float32", "torch", 1.0),
    _case("gru-b1", "gru", "b1 t256 1x768", "float32", "torch", 1.7),
    _case("lstm-heads", "lstm", "b16 t256 12x64", "float32", "torch", 3.0),
    _case("gru-heads", "gru", "b16 t256 12x64", "float32", "torch", 3.0),
    _case("lstm-heads-reference", "lstm", "b16 t256 12x64", "float32", "reference", 20.0),
    _case("lstm-step", "lstm", "b1 t1 1x768", "float32", "torch", 2.0),
    _case("gru-step", "gru", "b1 t1 1x768", "float32", "torch", 2.0),
    _case("lstm-bf16", "lstm", "b16 t256 1x768", "bfloat16", "torch", 1.0),
    _case("gru-bf16", "gru", "b16 t256 1x768", "bfloat16", "torch"),
    _case("lstm-fp16", "lstm", "b16 t256 1x768", "float16", "torch"),
    _case("lstm-fp64", "lstm", "b16 t256 1x768", "float64", "torch"),
    _case("rnn-b16", "rnn_tanh", "b16 t256 1x768", "float32", "torch"),
    _case("slstm-heads", "slstm", "b16 t256 12x64", "float32", "reference"),
    _case("slstm-heads-bf16", "slstm", "b16 t256 12x64", "bfloat16", "reference"),
]


def passes(case: Case) -> tuple[str, ...]:
    """Returns the passes to time: "forward" saves nothing, "train" includes all gradients."""
    return ("step",) if case.is_step else ("forward", "train")


def has_torch_peer(case: Case) -> bool:
    return case.cell in TORCH_MODULES


def parameters(case: Case) -> dict[str, torch.Tensor]:
    """Draws x [B, T, I], w_ih [G, N, D, I], w_hh [G, N, D, D], bias [R, N, D], state [K, B, N, D],
    dh."""
    spec, inputs = CELLS[case.cell], case.inputs
    B, T, N, D, G = case.batch, case.steps, case.heads, case.width, spec.gates
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(case.torch_dtype)

    return {
        "x": normal(B, T, inputs),
        "w_ih": normal(G, N, D, inputs, scale=inputs**-0.5),
        "w_hh": normal(G, N, D, D, scale=0.5 * D**-0.5),
        "bias": normal(spec.bias_rows, N, D, scale=0.1),
        "state": normal(spec.states, B, N, D, scale=0.5),
        "dh": normal(B, T, inputs),
    }


class Ours:
    """Our provider: projection and cell, by the kernel or by the torch reference."""

    def __init__(self, case: Case, p: dict[str, torch.Tensor], kernel):
        self.case, self.kernel, self.state = case, kernel, tuple(p["state"])
        self.leaves = [p[k].clone().requires_grad_() for k in ("x", "w_ih", "w_hh", "bias")]

    def __call__(self) -> torch.Tensor:
        x, w_ih, w_hh, bias = self.leaves
        gates = self.kernel.linear(x, w_ih.flatten(0, 2)).unflatten(-1, w_ih.shape[:3])
        if self.case.steps == 1:
            h, _ = self.kernel.recurrent_step(self.case.cell, gates[:, 0], w_hh, bias, self.state)
            return h.flatten(1).unsqueeze(1)
        return self.kernel.recurrent(self.case.cell, gates, w_hh, bias)[0].flatten(2)

    def gradients(self, grads) -> list[torch.Tensor]:
        return list(grads)


class Torch:
    """torch.nn as a provider: one module per head, with the same parameters."""

    def __init__(self, case: Case, p: dict[str, torch.Tensor]):
        self.case, self.x = case, p["x"].clone().requires_grad_()
        module, options = TORCH_MODULES[case.cell]
        inputs, D, dtype = p["x"].shape[-1], case.width, p["x"].dtype
        self.heads = [
            module(inputs, D, batch_first=True, dtype=dtype, **options) for _ in range(case.heads)
        ]
        G = p["w_ih"].shape[0]
        for n, head in enumerate(self.heads):
            bias = p["bias"][:, n].flatten()
            with torch.no_grad():
                head.weight_ih_l0.copy_(p["w_ih"][:, n].flatten(0, 1))
                head.weight_hh_l0.copy_(p["w_hh"][:, n].flatten(0, 1))
                head.bias_ih_l0.copy_(bias[: G * D])
                head.bias_hh_l0.zero_()[(G - 1) * D :] += bias[G * D :] if len(bias) > G * D else 0
        self.leaves = [self.x, *(q for head in self.heads for q in head.parameters())]
        states = tuple(s[None, :, 0].contiguous() for s in p["state"])
        self.state = () if case.steps > 1 else (states if len(states) > 1 else states[0],)

    def __call__(self) -> torch.Tensor:
        outputs = [head(self.x, *self.state)[0] for head in self.heads]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def gradients(self, grads) -> list[torch.Tensor]:
        """Returns the gradients in the order and shapes of Ours: dx, dw_ih, dw_hh, dbias."""
        dx, *rest = grads
        G, D = len(rest[0]) // self.case.width, self.case.width
        w_ih, w_hh, b_ih, b_hh = (
            torch.stack([g.view(G, D, *g.shape[1:]) for g in rest[k::4]], 1) for k in range(4)
        )
        rows = CELLS[self.case.cell].bias_rows
        return [dx, w_ih, w_hh, torch.cat([b_ih, b_hh[-1:]])[:rows]]


def peer_of(case: Case, p: dict[str, torch.Tensor], kind: str):
    return Torch(case, p) if kind == "torch" else Ours(case, p, reference)


def work(
    case: Case, which: str, product_rate: Callable, bandwidth: Callable
) -> tuple[float, float]:
    """Returns GFLOP and the floor in ms at `product_rate()` GFLOP/s and `bandwidth(size)` GB/s.

    A pass over time takes as long as its arithmetic, or as reading the recurrent weight once per
    step if that is longer. Training has two such passes, and the products of the projection and of
    dw_hh.
    """
    rate = product_rate()
    G, I, rows = CELLS[case.cell].gates, case.inputs, case.batch * case.steps
    project, recur = 2e-9 * rows * G * I * I, 2e-9 * rows * G * I * case.width
    weight = G * I * case.width * case.torch_dtype.itemsize
    if which == "step":  # one row: both weights are read once
        weight *= 1 + I // case.width
        recurrence = max((project + recur) / rate * 1e3, weight / bandwidth(weight) * 1e-6)
        return project + recur, recurrence
    recurrence = max(recur / rate * 1e3, case.steps * weight / bandwidth(weight) * 1e-6)
    if which == "train":
        return 3 * (project + recur), (3 * project + recur) / rate * 1e3 + 2 * recurrence
    return project + recur, project / rate * 1e3 + recurrence
