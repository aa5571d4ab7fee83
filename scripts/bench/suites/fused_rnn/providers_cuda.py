"""GPU benchmark providers of fused_rnn: their protocol, ours, torch.nn's, and the float64
reference.

Each provider takes its inputs in its own best layout, so that none is charged for a transpose:
`native` and `native_dh` convert from ours, `h` and `dx` convert results back. `leaves` are its
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bench.suites.fused_rnn.case import Case
from bench.suites.fused_rnn.cases_cuda import CELLS, lengths

TORCH_CLASSES = {
    "lstm": ("LSTM", {}),
    "gru": ("GRU", {}),
    "rnn_tanh": ("RNN", {"nonlinearity": "tanh"}),
    "rnn_relu": ("RNN", {"nonlinearity": "relu"}),
}
Parameters = dict[str, Tensor]


class Unavailable(Exception):
    """A provider cannot run here; the message says why."""


def leaf(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return t.detach().to(dtype or t.dtype, copy=True).contiguous().requires_grad_()


class Provider:
    """Base class of a provider, batch first as ours; others override the layouts."""

    dtype: torch.dtype | None = None  # dtype of its tensors, if not the case's
    leaves: list[Tensor]
    comparable = True  # computes the same function, so that its error means something

    def native(self, x: Tensor) -> Tensor:
        return x.to(self.dtype or x.dtype)

    def native_dh(self, dh: Tensor) -> Tensor:  # [B, T, I] as native as the output is
        return dh.to(self.dtype or dh.dtype)

    def h(self, h: Tensor) -> Tensor:  # native -> [B, T, directions * I]
        return h

    def dx(self, dx: Tensor) -> Tensor:  # native -> the shape of x
        return dx

    def train(self, mode: bool) -> None:
        """Switches between training and inference."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Ours(Provider):
    """Our op, by the kernel or the reference, after F.linear if the case has the projection."""

    def __init__(self, case: Case, p: Parameters, kernel: Any, backend: str = "auto"):
        self.case, self.kernel = case, kernel
        names = [name for name in ("w_ih", "w_hh", "bias") if name in p]
        self.leaves = [leaf(p[name]) for name in names]
        self.options = {"precision": "tf32" if case.dtype == "tf32" else "highest"}
        self.options |= {"save": case.save, "backend": backend}

    def __call__(self, x: Tensor) -> Tensor:
        *w_ih, w_hh, bias = self.leaves
        for w in w_ih:
            x = F.linear(x, w.flatten(0, 2)).unflatten(-1, w.shape[:3])
        return self.kernel.recurrent(self.case.cell, x, w_hh, bias, **self.options)[0].flatten(2)


class Module(Provider):
    """A torch.nn module, or flashcell's replacement; with one layer it has the case's weights."""

    def __init__(
        self, case: Case, p: Parameters, library: Any, dtype: torch.dtype | None, **options
    ):
        if case.cell not in TORCH_CLASSES or case.heads > 1:
            raise Unavailable(f"torch.nn has no {case.cell} with {case.heads} heads")
        self.case, self.dtype = case, dtype
        self.batch_first = library is not torch.nn
        name, more = TORCH_CLASSES[case.cell]
        torch.manual_seed(0)
        module = getattr(library, name)(
            case.inputs, case.width, case.layers, batch_first=self.batch_first,
            bidirectional=case.directions == 2, **more, **options,
        )  # fmt: skip
        if "w_hh" in p:
            _copy_weights(module, p)
        module = module.to(case.torch_dtype)  # the dtype in which all providers compute
        self.module = module.to(p["x"].device, dtype or p["x"].dtype)
        self.module.flatten_parameters()
        self.leaves = list(self.module.parameters())
        self.sizes: Tensor | None = None

    def native(self, x: Tensor) -> Tensor:
        x = super().native(x)
        if self.case.packed:
            packed = pack_padded_sequence(x, lengths(self.case), batch_first=True)
            self.sizes = packed.batch_sizes
            return packed.data
        return x if self.batch_first else x.transpose(0, 1).contiguous()

    native_dh = native

    def h(self, h: Tensor) -> Tensor:
        if self.sizes is not None:
            h, _ = pad_packed_sequence(PackedSequence(h, self.sizes), batch_first=True)
            return h
        return h if self.batch_first else h.transpose(0, 1)

    dx = h

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def __call__(self, x: Tensor) -> Tensor:
        if self.sizes is not None:
            return self.module(PackedSequence(x, self.sizes))[0].data
        return self.module(x)[0]


def _copy_weights(module: torch.nn.RNNBase, p: Parameters) -> None:
    G, D = p["w_hh"].shape[0], p["w_hh"].shape[2]
    bias = p["bias"].flatten()
    with torch.no_grad():
        module.weight_ih_l0.copy_(p["w_ih"].flatten(0, 2))
        module.weight_hh_l0.copy_(p["w_hh"].flatten(0, 2))
        module.bias_ih_l0.copy_(bias[: G * D])
        module.bias_hh_l0.zero_()
        if len(bias) > G * D:  # n has a recurrent bias of its own
            module.bias_hh_l0[-D:] = bias[G * D :]


CUDNN = {
    "cudnn-fp16": torch.float16,
    "cudnn-bf16": torch.bfloat16,
    "cudnn-fp32": torch.float32,
    "cudnn-tf32": torch.float32,  # the case has switched TF32 on
}


def make_ours(case: Case, p: Parameters, kernel: Any, backend: str) -> Provider:
    if case.form != "module":
        return Ours(case, p, kernel, backend)
    import flashcell

    name = TORCH_CLASSES[case.cell][0]
    if not hasattr(flashcell, name):
        raise Unavailable(f"flashcell.{name} is not there yet")
    return Module(case, p, flashcell, None, backend=backend)


def make_exact(case: Case, p: Parameters, reference: Any) -> Provider:
    """Returns the float64 reference of a case: our torch loop, or torch.nn's modules."""
    wide = {k: v.double() for k, v in p.items()}
    if case.form == "module":
        return Module(case, wide, torch.nn, torch.float64)
    exact = Ours(case, wide, reference, "reference")
    exact.options["precision"] = "highest"
    return exact


def make_steps(
    provider: str, case: Case, p: Parameters, kernel: Any, copies: int
) -> list[Callable]:
    """Makes `copies` decoding steps, each with its own weights and states, as a model's layers
    have.

    Every call returns h [B, I] and the next states.
    """
    spec, x = CELLS[case.cell], p["x"][:, 0]
    if provider == "ours":

        def ours() -> Callable:
            w = {k: v.clone() for k, v in p.items()}

            def step() -> tuple[Tensor, ...]:
                gates = x
                if "w_ih" in w:
                    gates = F.linear(x, w["w_ih"].flatten(0, 2)).unflatten(-1, w["w_ih"].shape[:3])
                h, state = kernel.recurrent_step(
                    case.cell, gates, w["w_hh"], w["bias"], tuple(w["state"])
                )
                return h.flatten(1), *state

            return step

        return [ours() for _ in range(copies)]

    def cudnn() -> Callable:
        peer = Module(case, p, torch.nn, CUDNN[provider])
        peer.train(False)
        inputs = peer.native(p["x"])
        states = tuple(s.transpose(0, 1).to(inputs.dtype).contiguous() for s in p["state"])

        def step() -> tuple[Tensor, ...]:
            h, last = peer.module(inputs, states if spec.states > 1 else states[0])
            return h[0], *(s[0].unsqueeze(1) for s in (last if spec.states > 1 else (last,)))

        return step

    return [cudnn() for _ in range(copies)]
