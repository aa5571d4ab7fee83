"""Times our kernels and torch on a CPU, alternating in one run, for bench_ops --device cpu."""

import argparse
import gc
import statistics
import time
from functools import cache
from types import ModuleType
from typing import Any

import torch

from measurement.record import Row

# Largest relative error (Frobenius norm, against float64 on the same inputs) of an output or
# gradient that we still time: the units of each dtype, times the growth of T = 256 steps. The
# tests hold the strict bounds; this gate keeps a wrong kernel out of the tables.
GATE = {"float64": 1e-13, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}


def run(provider, which: str, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs the timed call of a provider: returns h, and for "train" the gradients of its leaves."""
    if which != "train":
        with torch.no_grad():
            return (provider(),)
    h = provider()
    return h, *torch.autograd.grad(h, provider.leaves, dh)


def errors(cases: ModuleType, case: Any, which: str, p, providers) -> list[float]:
    """Returns each provider's worst relative error of h and gradients, against float64."""

    def values(provider, dh: torch.Tensor) -> list[torch.Tensor]:
        h, *gradients = run(provider, which, dh)
        return [h, *provider.gradients(gradients)] if gradients else [h]

    wide = {k: v.double() for k, v in p.items()}
    exact = cases.peer_of(case, wide, "torch" if cases.has_torch_peer(case) else "reference")
    expected = values(exact, wide["dh"])
    gap = lambda got, want: ((got.double() - want).norm() / want.norm()).item()
    return [max(map(gap, values(provider, p["dh"]), expected)) for provider in providers]


def milliseconds(call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e3


def alternate(ours, peer, budget: float) -> tuple[list[float], list[float]]:
    """Times both providers alternately for about `budget` seconds, at least 5 ms per sample."""
    repeats = [max(1, round(5 / max(milliseconds(f, 3), 1e-3))) for f in (ours, peer)]
    samples: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget
    gc.disable()
    while len(samples[0]) < 5 or (time.perf_counter() < end and len(samples[0]) < 101):
        order = (0, 1) if len(samples[0]) % 2 == 0 else (1, 0)
        for provider in order:
            samples[provider].append(milliseconds((ours, peer)[provider], repeats[provider]))
    gc.enable()
    return samples


@cache
def product_rate(dtype: str, kernel) -> float:
    """Measures the GFLOP/s of torch's matrix product, or of the kernel's own if that is faster."""
    M, K, N = 1024, 1024, 2048
    a, b = (torch.randn(n, K).to(getattr(torch, dtype)) for n in (M, N))
    products = [torch.nn.functional.linear, getattr(kernel, "linear", None)]
    times = [
        milliseconds(lambda f=f: f(a, b), 1) for f in filter(callable, products) for _ in range(20)
    ]
    return 2e-6 * M * K * N / min(times)


@cache
def copy_bandwidth(size: int) -> float:
    """Measures the GB/s, read plus written, of a copy whose two buffers together have `size`
    bytes."""
    a = torch.ones(max(size // 8, 1024))
    b, repeats = torch.empty_like(a), max(1, 2**26 // size)
    return 8e-6 * a.numel() / min(milliseconds(lambda: b.copy_(a), repeats) for _ in range(7))


def measure(cases: ModuleType, case: Any, which: str, kernel, budget: float) -> Row:
    """Measures a case; returns its row. `cases` is the kernel's bench/suites/<kernel>/cases.py."""
    p = cases.parameters(case)
    ours, peer = cases.Ours(case, p, kernel), cases.peer_of(case, p, case.peers[0])
    error, peer_error = errors(cases, case, which, p, (ours, peer))
    if not error <= GATE[case.dtype]:
        raise SystemExit(
            f"error: {case.name} {which}: relative error {error:.2g} against float64, but "
            f"{case.dtype} must be within {GATE[case.dtype]:.0e}: a wrong result is not timed"
        )
    providers = (lambda: run(ours, which, p["dh"])), (lambda: run(peer, which, p["dh"]))
    mine, theirs = alternate(*providers, budget)
    p20, p50, p80 = statistics.quantiles(mine, n=10, method="inclusive")[1:8:3]
    rate = lambda: product_rate(case.dtype, kernel)
    gflop, floor = cases.work(case, which, rate, copy_bandwidth)
    values = {
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "gflops": gflop / p50 * 1e3,
        "floor_fraction": floor / p50,
        "peer_p50_ms": statistics.median(theirs),
        "ratio": statistics.median(b / a for a, b in zip(mine, theirs, strict=True)),
        "error": error,
        "peer_error": peer_error,
    }
    row = {"case": case.name, "op": case.cell, "pass": which, "dtype": case.dtype}
    row |= {
        "B": case.batch,
        "T": case.steps,
        "N": case.heads,
        "D": case.width,
        "peer": case.peers[0],
    }
    row |= {"threads": torch.get_num_threads(), "samples": len(mine)}
    row |= {key: f"{value:.4g}" for key, value in values.items()}
    return row | {"required": case.required or ""}


def run_cases(
    args: argparse.Namespace,
    cases: ModuleType,
    kernel: Any,
    stamp: dict[str, str],
    names: list[str],
) -> tuple[list[Row], str]:
    """Measures all cases; returns the rows, and the cases below their required ratio."""
    rows, missed = [], []
    print("{device}, torch {torch}, {commit}, {kernel}, ".format(**stamp), end="")
    print(f"{args.threads} threads")
    print(f"{'case':22}{'pass':9}{'p50 ms':>9}{'peer ms':>9}{'GFLOP/s':>9}{'floor':>7}", end="")
    print(f"{'error':>9}{'ratio':>8}  required")
    for case in cases.CASES:
        for which in cases.passes(case) if case.name in names else ():
            row = measure(cases, case, which, kernel, args.seconds or 4.0)
            verdict = "information" if case.required is None else f"{case.required}x holds"
            if case.required is not None and float(row["ratio"]) < case.required:
                verdict = f"{case.required}x MISSED"
                missed.append(f"{case.name} {which}")
            print(
                f"{case.name:22}{which:9}{row['p50_ms']:>9}{row['peer_p50_ms']:>9}"
                f"{row['gflops']:>9}{float(row['floor_fraction']):>7.0%}{row['error']:>9}"
                f"{float(row['ratio']):>7.2f}x  {verdict}",
                flush=True,
            )
            rows.append({**row, **stamp})
    return rows, f"below the required ratio: {', '.join(missed)}" if missed else ""
