"""CPU benchmark cases of tfla: shapes, our provider, the peer, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashcell.kernels import tfla as reference
from flashcell.kernels.tfla.cells import CELLS
from flashcell.kernels.tfla.cost_model import chunk_flops, step_bytes, step_flops

LEAVES = ("q", "k", "v", "i", "f")
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
PEER_CHUNK = 128  # faster than the peer's default of 64 in every case


@dataclass(frozen=True)
class Case:
    """One line of the table: an mLSTM's shape and the target ratio to the peer."""

    batch: int
    steps: int  # 1: one decoding step, in place
    heads: int
    key: int
    width: int  # of the values (V)
    dtype: str
    required: float | None
    passes: tuple[str, ...] = ("forward", "train")
    cell: str = "exp"  # the input gate
    peers: tuple[str, ...] = ("mlstm_kernels",)

    @property
    def name(self) -> str:
        shape = f"{self.heads}x{self.key}x{self.width}-B{self.batch}T{self.steps}"
        return f"mlstm-{self.cell}-{shape}-{SHORT[self.dtype]}"


SHAPES = ((1, 2048, 8, 128, 256), (1, 1024, 8, 256, 512))
STEPS = ((1, 1, 8, 256, 512), (8, 1, 8, 256, 512))
CASES = [Case(*shape, dtype, 2.0) for shape in SHAPES for dtype in SHORT]
CASES += [Case(*shape, dtype, 5.0, ("step",)) for shape in STEPS for dtype in SHORT]


def passes(case: Case) -> tuple[str, ...]:
    return case.passes


def has_torch_peer(case: Case) -> bool:
    return False


def parameters(case: Case) -> dict[str, torch.Tensor]:
    """Draws q, k [B, T, H, K], v, dh [B, T, H, V], gates i, f [B, T, H] and a state, these in
    fp32."""
    g = torch.Generator().manual_seed(0)
    B, T, H, K, V = case.batch, case.steps, case.heads, case.key, case.width
    normal = lambda *s: torch.randn(s, generator=g)
    p = {n: normal(B, T, H, w) for n, w in (("q", K), ("k", K), ("v", V), ("dh", V))}
    p = {n: t.to(getattr(torch, case.dtype)) for n, t in p.items()}
    p |= {"i": normal(B, T, H) - 2, "f": normal(B, T, H) + 5}
    return p | {"C": normal(B, H, K, V), "n": normal(B, H, K), "m": normal(B, H)}


class Ours:
    """Our provider, by the kernel or the torch reference. A step updates its state in place."""

    def __init__(self, case: Case, p: dict[str, torch.Tensor], kernel):
        self.kernel, self.options = kernel, {"input_gate": case.cell}
        self.leaves = [p[n].clone().requires_grad_() for n in LEAVES]
        self.state = tuple(p[n].clone() for n in "Cnm") if case.steps == 1 else None
        self.token = [x.detach()[:, 0] for x in self.leaves]

    def __call__(self) -> torch.Tensor:
        if self.state is None:
            return self.kernel.mlstm(*self.leaves, **self.options)[0]
        step = self.kernel.mlstm_step(*self.token, self.state, **self.options, inplace=True)
        return step[0][:, None]

    def gradients(self, grads) -> list[torch.Tensor]:
        return list(grads)


class Peer:
    """The peer, PyPI mlstm_kernels in torch: `native_autograd` and its step, head first, one
    dtype."""

    def __init__(self, case: Case, p: dict[str, torch.Tensor]):
        try:
            from mlstm_kernels.torch import get_mlstm_kernel, get_mlstm_step_kernel
        except ImportError as error:
            raise SystemExit(
                f"error: {case.name}: mlstm_kernels cannot be imported: {error}"
            ) from None
        step = case.steps == 1
        self.call = get_mlstm_step_kernel("native") if step else None
        self.chunkwise = get_mlstm_kernel("chunkwise--native_autograd")
        own = [p[n].to(p["v"].dtype).transpose(1, 2).contiguous() for n in LEAVES]
        self.leaves = [x.requires_grad_() for x in own]
        self.state = {"c": p["C"], "n": p["n"], "m": p["m"][..., None]} if step else {}
        q, k, v, i, f = (x.detach()[:, :, 0] for x in own)
        self.token = (q, k, v, i[..., None], f[..., None])

    def __call__(self) -> torch.Tensor:
        if self.call is None:
            h = self.chunkwise(*self.leaves, eps=0.0, chunk_size=PEER_CHUNK)
            return h.transpose(1, 2)
        h, _ = self.call(*self.token, **self.state, eps=0.0)
        return h[:, None]

    def gradients(self, grads) -> list[torch.Tensor]:
        return [g.transpose(1, 2) for g in grads]


def peer_of(case: Case, p: dict[str, torch.Tensor], kind: str):
    return Peer(case, p) if kind == "mlstm_kernels" else Ours(case, p, reference)


def work(
    case: Case, which: str, product_rate: Callable, bandwidth: Callable
) -> tuple[float, float]:
    """Returns GFLOP with chunks of 64 (times three in training), and the floor in ms.

    The floor is GFLOP at `product_rate()` GFLOP/s, or for a step bytes at `bandwidth(size)`
    GB/s."""
    cell, heads = CELLS[case.cell], case.batch * case.heads
    if which == "step":
        io = getattr(torch, case.dtype).itemsize
        size = heads * step_bytes(cell, case.key, case.width, io)
        return 1e-9 * heads * step_flops(cell, case.key, case.width), size / bandwidth(size) * 1e-6
    flops = chunk_flops(cell, case.key, case.width).of_sequence(case.steps, 64)
    gflop = 1e-9 * heads * flops * (3 if which == "train" else 1)
    return gflop, gflop / product_rate() * 1e3
