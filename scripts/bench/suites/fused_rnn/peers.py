"""GPU benchmark peers of fused_rnn besides torch.nn; for the protocol see providers_cuda.py.

flashrnn (NX-AI, PyPI) is timed where it can be imported: see flashrnn_peer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.suites.fused_rnn import flashrnn_peer
from bench.suites.fused_rnn.case import Case
from bench.suites.fused_rnn.providers_cuda import (
    CUDNN,
    Module,
    Parameters,
    Provider,
    Unavailable,
    leaf,
)


class FlashRNN(Provider):
    """flashrnn's fused kernel, in its layouts: x [T, B, N, D, G], R [N, D, G, D], h [T, B, N,
    D]."""

    def __init__(self, case: Case, p: Parameters):
        package = flashrnn_peer.flashrnn()
        if (shape := flashrnn_shape(case)) is None:
            raise Unavailable(f"not compared for {case.cell} in {case.dtype}")
        kind = str(case.torch_dtype).removeprefix("torch.")
        self.call, self.case = package.flashrnn, case
        self.config = flashrnn_peer.config(shape, kind)
        w_ih = [leaf(p["w_ih"].permute(1, 2, 0, 3))] if "w_ih" in p else []
        w_hh, bias = p["w_hh"].permute(1, 2, 0, 3), p["bias"].permute(1, 2, 0)
        self.leaves = [*w_ih, leaf(w_hh), leaf(bias)]

    def native(self, x: Tensor) -> Tensor:
        axes = (1, 0, 3, 4, 2) if x.dim() == 5 else (1, 0, 2)
        return x.permute(axes).contiguous()

    def native_dh(self, dh: Tensor) -> Tensor:
        shape = (self.case.heads, self.case.width)
        return dh.transpose(0, 1).contiguous().unflatten(-1, shape)

    def h(self, h: Tensor) -> Tensor:
        return h.transpose(0, 1).flatten(2)

    def dx(self, dx: Tensor) -> Tensor:
        return dx.permute((1, 0, 4, 2, 3) if dx.dim() == 5 else (1, 0, 2))

    def __call__(self, x: Tensor) -> Tensor:
        *w_ih, w_hh, bias = self.leaves
        for w in w_ih:
            x = F.linear(x, w.flatten(0, 2)).unflatten(-1, w.shape[:3])
        try:
            states, _ = self.call(x, w_hh, bias, config=self.config)
        except (RuntimeError, OSError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise Unavailable(f"flashrnn: {reason[:120]}") from None
        return states[0]


def flashrnn_shape(case: Case) -> flashrnn_peer.Shape | None:
    """Returns flashrnn's shape of a case, or None if the two are not compared."""
    if case.cell not in flashrnn_peer.CELLS or case.torch_dtype == torch.float32:
        return None
    return case.cell, case.heads, case.width, case.batch


def prepare(cases: Iterable[Case], peers: Iterable[str]) -> None:
    """Builds the peers' modules for `cases`, which takes minutes and is not timed."""
    wanted = [case for case in cases if "flashrnn" in case.peers and "flashrnn" in peers]
    try:
        flashrnn_peer.build_all(filter(None, map(flashrnn_shape, wanted)))
    except Exception as reason:  # its rows say so too; the other providers still run
        print(f"flashrnn is not built: {reason}", flush=True)


def _lstm_loop(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """An LSTM as a torch loop: x [T, N, B, G * D], w [N, D, G * D], bias [N, 1, G * D] -> h."""
    h = c = x.new_zeros(*x.shape[1:3], w.shape[1])
    outputs = []
    for gates in (x + bias).unbind():
        i, f, g, o = torch.baddbmm(gates, h, w).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs)


def _slstm_loop(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    h = c = n = x.new_zeros(*x.shape[1:3], w.shape[1])
    m = torch.full_like(h, -1e30)
    outputs = []
    for gates in (x + bias).unbind():
        i, f, z, o = torch.baddbmm(gates, h, w).chunk(4, -1)
        log_f = F.logsigmoid(f) + m
        m = torch.maximum(i, log_f).detach()
        forget, write = torch.exp(log_f - m), torch.exp(i - m)
        c, n = forget * c + write * torch.tanh(z), forget * n + write
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    return torch.stack(outputs)


class Loop(Provider):
    """A loop of torch operations, head first, eager or compiled by torch.compile."""

    def __init__(self, case: Case, p: Parameters, compiled: bool):
        loops: dict[str, Callable[..., Tensor]] = {"lstm": _lstm_loop, "slstm": _slstm_loop}
        if case.cell not in loops or case.form != "op":
            raise Unavailable(f"no loop is written for {case.cell}, {case.form}")
        loop = loops[case.cell]
        self.loop = torch.compile(loop, fullgraph=True, dynamic=False) if compiled else loop
        weight = p["w_hh"].permute(1, 3, 0, 2).flatten(2)
        self.leaves = [leaf(weight), leaf(p["bias"].transpose(0, 1).flatten(1).unsqueeze(1))]
        self.shape = case.heads, case.width

    def native(self, x: Tensor) -> Tensor:
        return x.permute(1, 3, 0, 2, 4).flatten(3)

    def native_dh(self, dh: Tensor) -> Tensor:
        return dh.unflatten(-1, self.shape).permute(1, 2, 0, 3).contiguous()

    def h(self, h: Tensor) -> Tensor:
        return h.permute(2, 0, 1, 3).flatten(2)

    def dx(self, dx: Tensor) -> Tensor:
        return dx.unflatten(-1, (-1, self.shape[1])).permute(2, 0, 3, 1, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return self.loop(x, *self.leaves)


class Attention(Provider):
    """Causal FlashAttention at the same heads, batch and length, for comparison of time only."""

    comparable = False

    def __init__(self, case: Case, p: Parameters):
        self.shape = case.heads, case.width
        self.leaves = [leaf(p["x"][:, :, g].transpose(1, 2)) for g in (1, 2)]  # k, v

    def native(self, x: Tensor) -> Tensor:  # [B, T, G, N, D] -> q [B, N, T, D]
        return x[:, :, 0].transpose(1, 2).contiguous()

    def native_dh(self, dh: Tensor) -> Tensor:
        return dh.unflatten(-1, self.shape).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kind = SDPBackend.FLASH_ATTENTION if x.is_cuda else SDPBackend.MATH
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(x, *self.leaves, is_causal=True)


def make_peer(kind: str, case: Case, p: Parameters) -> Provider:
    if kind in CUDNN:
        return Module(case, p, torch.nn, CUDNN[kind])
    return OTHERS[kind](case, p)


OTHERS: dict[str, Callable[[Case, Parameters], Provider]] = {
    "flashrnn": FlashRNN,
    "loop": lambda case, p: Loop(case, p, compiled=False),
    "compile": lambda case, p: Loop(case, p, compiled=True),
    "sdpa": Attention,
}
PEERS = (*CUDNN, *OTHERS)
