"""Measures how the error of h against float64 grows over the steps, for bench_ops --errors.

"step" rows: percentiles over batch and units of |h - h64| at a step of an LSTM 1x768, B16, T 512.
"drift" rows: the same over 64 steps that end at a step of an LSTM 12x64, B2, T 16384.
All providers have the same inputs and weights, bf16 numbers; cuDNN gets x through an identity.
"""

from dataclasses import replace
from typing import Any

import torch

from bench.ops.cuda import GATE
from bench.suites.fused_rnn.case import Case
from bench.suites.fused_rnn.cases_cuda import parameters
from bench.suites.fused_rnn.peers import FlashRNN
from bench.suites.fused_rnn.providers_cuda import Ours, Unavailable
from flashcell.kernels import fused_rnn as reference
from measurement.record import Row

STEP_CASE = Case("errors", "lstm", 16, 512, 1, 768)
DRIFT_CASE = Case("drift", "lstm", 2, 16384, 12, 64)
WINDOW = 64
DRIFT = 1.5  # most error of the last steps divided by that of the first
OURS = ("bfloat16", "float16", "tf32", "float32")
CUDNN = ("bfloat16", "float16", "tf32", "float32")


@torch.no_grad()
def cudnn(case: Case, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Runs nn.LSTM on projected x, with the identity as its input weight; returns h [B, T, D]."""
    D, dtype = case.width, case.torch_dtype
    module = torch.nn.LSTM(4 * D, D, device=p["x"].device, dtype=dtype)
    module.weight_ih_l0.copy_(torch.eye(4 * D))
    module.weight_hh_l0.copy_(p["w_hh"].flatten(0, 2))
    module.bias_ih_l0.copy_(p["bias"].flatten())
    module.bias_hh_l0.zero_()
    return module(p["x"].flatten(2).transpose(0, 1).to(dtype))[0].transpose(0, 1)


@torch.no_grad()
def ours(case: Case, p: dict[str, torch.Tensor], kernel: Any) -> torch.Tensor:
    p = {k: v.to(case.torch_dtype) for k, v in p.items()}
    return Ours(case, p, kernel)(p["x"])


@torch.no_grad()
def flashrnn(case: Case, p: dict[str, torch.Tensor]) -> torch.Tensor:
    provider = FlashRNN(case, p)
    return provider.h(provider(provider.native(p["x"])))


@torch.no_grad()
def exact(case: Case, p: dict[str, torch.Tensor]) -> torch.Tensor:
    wide = {k: v.double() for k, v in p.items()}
    return Ours(case, wide, reference, "reference")(wide["x"])


def percentiles(got: torch.Tensor, want: torch.Tensor) -> Row:
    """Returns percentiles of |got - want| over all elements of [B, steps, D]."""
    gaps = (got.double() - want).abs().flatten()
    points = torch.quantile(gaps, gaps.new_tensor([0.5, 0.9, 1.0])).tolist()
    row = dict(zip(("p50", "p90", "p100"), points, strict=True))
    row["relative"] = ((got.double() - want).norm() / want.norm()).item()
    return {k: f"{v:.4g}" for k, v in row.items()}


def run_errors(
    kernel: Any, device: str, stamp: dict[str, str], tiny: bool = False
) -> tuple[list[Row], str]:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    rows: list[Row] = []
    case = STEP_CASE.short(8, 2) if tiny else STEP_CASE
    p = parameters(case, device)
    want = exact(case, p)
    providers = {f"ours {d}": lambda d=d: ours(replace(case, dtype=d), p, kernel) for d in OURS}
    providers |= {f"cudnn {d}": lambda d=d: cudnn(replace(case, dtype=d), p) for d in CUDNN}
    providers["flashrnn bfloat16"] = lambda: flashrnn(case, p)
    print(
        f"LSTM {case.heads}x{case.width} B{case.batch} T{case.steps}, |h - h64|, last step; h relative"
    )
    for name, provider in providers.items():
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if name.endswith("tf32") else "ieee"
        try:
            got = provider()
        except (Unavailable, RuntimeError) as reason:
            print(f"  {name:18} {str(reason).partition(chr(10))[0]}", flush=True)
            continue
        fresh = [
            rows_of("step", name, t + 1, got[:, t], want[:, t]) for t in range(3, case.steps, 4)
        ]
        rows += fresh
        last, whole = fresh[-1], percentiles(got, want)["relative"]
        print(f"  {name:18} p50 {last['p50']:>9} p90 {last['p90']:>9} max {last['p100']:>9}"
              f"  relative {whole}", flush=True)  # fmt: skip
    drift, problem = run_drift(kernel, device, tiny)
    return [stamp_row | stamp for stamp_row in rows + drift], problem


def rows_of(kind: str, name: str, step: int, got: torch.Tensor, want: torch.Tensor) -> Row:
    provider, dtype = name.split()
    return {"kind": kind, "provider": provider, "dtype": dtype, "step": step} | percentiles(
        got, want
    )


def run_drift(kernel: Any, device: str, tiny: bool) -> tuple[list[Row], str]:
    case = DRIFT_CASE.short(16 if tiny else DRIFT_CASE.steps)
    window = 4 if tiny else WINDOW
    p = parameters(case, device)
    want = exact(case, p)
    ends = [window * 4**k for k in range(10) if window * 4**k <= case.steps]
    rows, problems = [], []
    print(
        f"LSTM {case.heads}x{case.width} B{case.batch}, relative error of h in {window} steps up to"
    )
    print(" " * 20 + "".join(f"{end:>10}" for end in ends))
    for dtype in OURS:
        got = ours(replace(case, dtype=dtype), p, kernel)
        parts = [slice(end - window, end) for end in ends]
        fresh = [
            rows_of("drift", f"ours {dtype}", part.stop, got[:, part], want[:, part])
            for part in parts
        ]
        rows += fresh
        errors = [float(row["relative"]) for row in fresh]
        print(f"  ours {dtype:13}" + "".join(f"{error:10.2e}" for error in errors), flush=True)
        if not (max(errors) <= GATE[dtype] and errors[-1] <= DRIFT * errors[0]):
            problems.append(f"drift of {dtype}: {errors[0]:.2g} to {errors[-1]:.2g}")
    return rows, "; ".join(problems)
