"""GPU benchmark cases of tfla (bench_ops --suite tfla): shapes, providers, bytes moved."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

BANDWIDTH, RATE = 4.3e12, 790e12  # one H200: bytes/s of a copy, bf16 FLOP/s of a large product
TOKENS = 65_536


class Unavailable(Exception):
    """A provider cannot run this case here."""


@dataclass(frozen=True)
class Case:
    """One shape in bf16, with limits in ms for "forward", "train" and "step"."""

    gate: str  # the input gate: "exp" or "sigmoid"
    heads: int
    key: int
    value: int
    batch: int
    steps: int  # 1: one decoding step, in place
    chunk: int | None = None
    limits: tuple[float | None, float | None] = (None, None)  # ms: forward or step, train
    memory: float | None = None  # GB that "train" may allocate beside its inputs and dh
    providers: tuple[str, ...] = ()
    of: str = "must"  # suite: must, chunks, heads, lengths

    @property
    def name(self) -> str:
        shape = f"{self.heads}x{self.key}x{self.value}-B{self.batch}T{self.steps}"
        chunk = f"-chunk{self.chunk}" if self.chunk else ""
        sweep = "-lengths" if self.of == "lengths" else ""  # one name would be in two suites
        return f"mlstm-{self.gate}-{shape}{chunk}{sweep}"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("step",) if self.steps == 1 else ("forward", "train")

    def limit(self, which: str) -> float | None:
        return self.limits[which == "train"]


GATES = ("sigmoid", "exp")
MLSTM_PEERS = ("mlstm_kernels", "mlstm_kernels-limit", "simple_gla", "gla", "lightning_attn",
               "sdpa-flash", "sdpa-cudnn", "mamba2")  # fmt: skip
TWO_PEERS = ("mlstm_kernels", "simple_gla")
MUST = [
    Case(gate, *shape, 8, 8192, limits=limits, memory=memory, providers=MLSTM_PEERS)
    for shape, both, memory in (
        ((16, 128, 256), ((1.2, 3.9), (1.3, 4.2)), 2.4),
        ((8, 256, 512), ((1.7, 6.0), (1.9, 6.5)), None),
    )
    for gate, limits in zip(GATES, both, strict=True)
]
STEPS = [
    Case("exp", 8, 256, 512, batch, 1, limits=(limit, None), providers=TWO_PEERS)
    for batch, limit in ((1, 4e-3), (8, 18e-3), (64, 138e-3))
]
LENGTHS = [
    Case("exp", 16, 128, 256, TOKENS // T, T, providers=TWO_PEERS, of="lengths")
    for T in (512, 2048, 8192, 32_768, 65_536)
]
CHUNKS = [
    Case(gate, *shape, 8, 8192, chunk, providers=("mlstm_kernels",), of="chunks")
    for shape in ((16, 128, 256), (8, 256, 512))
    for gate in GATES
    for chunk in (64, 128, 256, 512, 1024, 2048, 4096)
]
HEADS = [
    Case("exp", 4096 // width, width, width, 4, 8192, providers=TWO_PEERS, of="heads")
    for width in (32, 64, 128, 256, 512, 1024)
]
CASES = [*MUST, *STEPS, *LENGTHS, *CHUNKS, *HEADS]


def work(case: Case, which: str) -> tuple[float, float]:
    """Returns the FLOP with chunks of 64, and the bytes of one pass over all tensors."""
    rows, K, V = case.batch * case.steps * case.heads, case.key, case.value
    if which == "step":
        return rows * 6 * K * V, rows * (2 * 4 * K * V + 2 * (2 * K + 2 * V))
    flops = 64 * (K + V) + 4 * K * V
    moved = 2 * (2 * K + 2 * V)
    if which == "train":
        flops += 64 * (3 * K + 2 * V) + 10 * K * V
        moved += 2 * (2 * K + 2 * V) + 2 * (2 * K + V)
    return rows * flops, rows * moved


def floor_ms(case: Case, which: str) -> float:
    """Returns the floor in ms: the longer of products and memory traffic."""
    flops, moved = work(case, which)
    return 1e3 * max(flops / RATE, moved / BANDWIDTH)


def draw(case: Case, device: str = "cuda", dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Draws q, k [B, T, H, K], v, dh [B, T, H, V], and fp32 gates i, f [B, T, H] as in a model."""
    g = torch.Generator(device).manual_seed(0)
    B, T, H = case.batch, case.steps, case.heads
    normal = lambda *s: torch.randn(s, generator=g, device=device, dtype=torch.float32)
    p = {name: normal(B, T, H, case.key).to(dtype) for name in "qk"}
    p |= {name: normal(B, T, H, case.value).to(dtype) for name in ("v", "dh")}
    return p | {"i": normal(B, T, H) - 2, "f": normal(B, T, H) + 5}


LEAVES = ("q", "k", "v", "i", "f")
Call = Callable[[dict[str, torch.Tensor]], torch.Tensor]  # leaves as a provider has them -> its h


@dataclass(frozen=True)
class Provider:
    """A provider: conversion to its own layout, its function, and conversion of h to ours."""

    call: Call
    native: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict
    h: Callable[[torch.Tensor], torch.Tensor] = lambda h: h
    exact: bool = True  # computes this cell: its h is compared


def ours(case: Case, kernel) -> Provider:
    options = {"input_gate": case.gate, "chunk_size": case.chunk, "backend": "cuda"}
    return Provider(lambda p: kernel.mlstm(*(p[n] for n in LEAVES), **options)[0])


HEAD_FIRST = lambda p: {n: t.transpose(1, 2).contiguous() for n, t in p.items()}
OURS_AGAIN = lambda h: h.transpose(1, 2)


def mlstm_kernels(case: Case, limit: bool = False) -> Provider:
    """Makes the provider mlstm_kernels (PyPI): published Triton kernels, by default with its best
    chunk.

    The exponential gate takes its gates in fp32: with bf16 ones the compiler of Triton 3.6 aborts."""
    try:
        from mlstm_kernels.torch import get_mlstm_kernel
    except ImportError as error:
        raise Unavailable(f"mlstm_kernels cannot be imported: {error}") from None
    sigmoid = case.gate == "sigmoid"
    if limit and sigmoid:
        raise Unavailable("limit_chunk has the exponential gate alone")
    kind = "limit_chunk" if limit else "xl_chunk_siging" if sigmoid else "xl_chunk"
    run = get_mlstm_kernel(f"chunkwise--triton_{kind}")
    options = {"chunk_size": case.chunk or (64 if limit else 128), "eps": 0.0}
    options |= {"normalize": False} if sigmoid else {}

    def native(p):
        p = HEAD_FIRST(p)
        gates = torch.bfloat16 if sigmoid else torch.float32
        return p | {n: p[n].to(gates) for n in "if"}

    return Provider(lambda p: run(*(p[n] for n in LEAVES), **options), native, OURS_AGAIN)


def fla(op: str) -> Callable[[Case], Provider]:
    """Makes a provider of flash-linear-attention (PyPI), with this cell's sizes and no input
    gate, so other values; `gla` decays every key by itself. With Triton before 3.7.1 it refuses
    simple_gla's backward on Hopper, whose values are wrong there; only its time is used."""

    def make(case: Case) -> Provider:
        try:
            if op == "lightning_attn":
                from fla.ops.lightning_attn import chunk_lightning_attn

                run = lambda p: chunk_lightning_attn(p["q"], p["k"], p["v"], 1, 2)[0]
            elif op == "gla":
                from fla.ops.gla import chunk_gla

                run = lambda p: chunk_gla(p["q"], p["k"], p["v"], p["g"])[0]
            else:
                from fla.ops.common import chunk_o
                from fla.ops.simple_gla import chunk_simple_gla

                chunk_o.TRITON_ABOVE_3_7_1 = True
                run = lambda p: chunk_simple_gla(p["q"], p["k"], p["v"], p["g"])[0]
        except ImportError as error:
            raise Unavailable(f"fla cannot be imported: {error}") from None

        def native(p):
            g = F.logsigmoid(p["f"])
            g = g[..., None].expand_as(p["k"]).contiguous() if op == "gla" else g
            return {n: p[n] for n in ("q", "k", "v", "dh")} | {"g": g}

        return Provider(run, native, exact=False)

    return make


def sdpa(backend: str) -> Callable[[Case], Provider]:
    """Makes a provider of causal softmax attention of the same width, with heads of 128."""

    def make(case: Case) -> Provider:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        which, width = getattr(SDPBackend, backend), case.heads * case.value

        def native(p):
            B, T = p["v"].shape[:2]
            heads = lambda t: t.reshape(B, T, width // 128, 128).transpose(1, 2)
            v = heads(p["v"])
            return {"q": v * 0.5, "k": v * 0.25, "v": v, "dh": heads(p["dh"])}

        def run(p):
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(p["q"], p["k"], p["v"], is_causal=True)

        return Provider(run, native, exact=False)

    return make


def mamba2(case: Case) -> Provider:
    """Makes the provider mamba-ssm (PyPI): the dual form, heads of 64, state of 128. Its Triton
    kernels alone: the package as a whole imports a CUDA extension that must be built for this torch."""
    if "mamba_ssm" not in sys.modules:
        found = importlib.util.find_spec("mamba_ssm")
        if found is None:
            raise Unavailable("mamba_ssm is not installed")
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(found)  # its code is not run
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        raise Unavailable(f"mamba_ssm cannot be imported: {error}") from None
    heads = case.heads * case.value // 64

    def native(p):
        x = lambda t: t.reshape(*t.shape[:2], heads, 64)
        state = lambda t: t[:, :, :1, :128].contiguous()
        dt = x(p["v"])[..., 0].float().sigmoid()
        return {"v": x(p["v"]), "q": state(p["q"]), "k": state(p["k"]), "dt": dt, "dh": x(p["dh"])}

    def run(p):
        A = -p["dt"].new_ones(heads)
        return mamba_chunk_scan_combined(p["v"], p["dt"], A, p["k"], p["q"], chunk_size=256)

    return Provider(run, native, exact=False)


PEERS: dict[str, Callable[[Case], Provider]] = {
    "mlstm_kernels": mlstm_kernels,
    "mlstm_kernels-limit": lambda case: mlstm_kernels(case, limit=True),
    "simple_gla": fla("simple_gla"),
    "gla": fla("gla"),
    "lightning_attn": fla("lightning_attn"),
    "sdpa-flash": sdpa("FLASH_ATTENTION"),
    "sdpa-cudnn": sdpa("CUDNN_ATTENTION"),
    "mamba2": mamba2,
}


def make(case: Case, provider: str, kernel) -> Provider:
    return ours(case, kernel) if provider == "ours" else PEERS[provider](case)


# One step, in place: a call that may be captured, its state of its own.
def step_ours(case: Case, kernel) -> Callable[[], object]:
    p = {n: t[:, 0] for n, t in draw(case).items()}
    shape = case.batch, case.heads
    state = [torch.randn(*shape, *s, device="cuda") for s in ((case.key, case.value), (case.key,))]
    state = (*state, torch.zeros(*shape, device="cuda"))[: 3 if case.gate == "exp" else 1]
    run = lambda: kernel.mlstm_step(
        *(p[n] for n in LEAVES), state, input_gate=case.gate, inplace=True, backend="cuda"
    )
    return run


def step_mlstm_kernels(case: Case, kernel) -> Callable[[], object]:
    try:
        from mlstm_kernels.torch import get_mlstm_step_kernel
    except ImportError as error:
        raise Unavailable(f"mlstm_kernels cannot be imported: {error}") from None
    run = get_mlstm_step_kernel("triton")
    p = {n: t[:, 0].contiguous() for n, t in draw(case).items()}
    B, H, K, V = case.batch, case.heads, case.key, case.value
    C, n, m = (torch.randn(B, H, *s, device="cuda") for s in ((K, V), (K,), (1,)))
    gates = {"i": p["i"][..., None], "f": p["f"][..., None]}
    return lambda: run(q=p["q"], k=p["k"], v=p["v"], **gates, c=C, n=n, m=m)


def step_simple_gla(case: Case, kernel) -> Callable[[], object]:
    try:
        from fla.ops.simple_gla import fused_recurrent_simple_gla
    except ImportError as error:
        raise Unavailable(f"fla cannot be imported: {error}") from None
    p = draw(case)
    state = torch.randn(case.batch, case.heads, case.key, case.value, device="cuda")
    return lambda: fused_recurrent_simple_gla(
        p["q"], p["k"], p["v"], F.logsigmoid(p["f"]), initial_state=state, output_final_state=True
    )


STEP_CALLS = {"ours": step_ours, "mlstm_kernels": step_mlstm_kernels, "simple_gla": step_simple_gla}
