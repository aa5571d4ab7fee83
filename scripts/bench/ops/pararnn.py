"""Times diagonal_rnn against other providers on a GPU, for bench_ops --suite pararnn.

Ops are timed as CUDA graphs (of 20 calls where one is short), whole layers and what cannot be
captured between events. Two files: <device>.csv has times, in the form of all suites, and
<device>-pararnn.csv errors in every weight regime, residuals of every iteration, chunk sizes.
"""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch

from bench.suites.diagonal_rnn import cases_cuda as suite
from bench.suites.diagonal_rnn.cases_cuda import Case, Unavailable
from bench.timing import Sample, time_calls, time_graph
from flashcell.kernels import diagonal_rnn as reference
from measurement.record import Row

LOOP = 64  # steps that the float64 reference runs
SHORT_CALL = 0.1  # ms; shorter calls are timed several to a graph
GATE = {"float32": 2e-6, "bfloat16": 3.5e-3}  # relative error of h; of a gradient twice that
BUDGET = 0.06  # seconds of samples for each provider


class Wrong(Exception):
    """A provider's values differ from float64's; it is not timed."""


def copy_speed() -> float:
    """Measures the GB/s, read plus written, of a copy of 1 GiB."""
    a = torch.empty(2**28, device="cuda")
    b = torch.empty_like(a)
    return 8e-6 * a.numel() / time_calls(lambda k: b.copy_(a), "cuda", 0.05).p50


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def exact_h(case: Case, p: dict, which: str) -> torch.Tensor:
    """Computes the float64 reference, for a few channels: h of the first steps, or dx of the last
    ones.

    For a scan it is db instead of dx, for a layer dx of the first sequence."""
    if case.form == "layer":
        layer, x = deepcopy(p["layer"]).double(), p["x"][:1].double().requires_grad_()
        with torch.enable_grad():
            h, _ = layer(x, method="sequential", backend="reference")
            return torch.autograd.grad(h, x, p["dh"][:1].double())[0]
    some = slice(None, None, max(1, case.width // 64))
    wide = {k: v[..., some].double() for k, v in p.items()}
    T = min(LOOP, case.steps)
    ends = slice(None, T) if which == "forward" else slice(case.steps - T, None)
    before = case.steps - T - 1
    if case.is_scan:
        a, b, dh = (wide[k][:, ends] for k in ("a", "b", "dh"))
        if which == "forward":
            return reference.linear_scan(a, b)
        shifted = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        return reference.linear_scan(shifted, dh, reverse=True)
    spec = suite.CELLS[case.op]
    x = wide["x"][:, ends].requires_grad_(which == "backward")
    state = None
    if which == "backward" and before >= 0:
        kept = wide["saved"][:, before].unbind(1) if spec.states > 1 else ()
        state = (wide["h"][:, before], *kept)
    rows = (wide["weight"][:3], wide["weight"][3:])[: 1 + (spec.weights > 3)]
    with torch.enable_grad():
        h, _ = getattr(reference, case.op)(x, *rows, state, method="sequential")
        return torch.autograd.grad(h, x, wide["dh"][:, ends])[0] if which == "backward" else h


def error_of(case: Case, provider: str, call: Callable, p: dict) -> float:
    """Returns a provider's relative error of h or dx; NaN for "plain", which has none."""
    if provider == "plain":
        return math.nan
    got = call()[0]
    if case.form == "layer":
        return gap(got[:1], exact_h(case, p, case.which))
    if provider == "accelerated-scan":
        got = got.transpose(1, 2)
    T = min(LOOP, case.steps)
    got = got[:, :T] if case.which == "forward" else got[:, case.steps - T :]
    return gap(got[..., :: max(1, case.width // 64)], exact_h(case, p, case.which))


def time_provider(case: Case, call: Callable) -> Sample:
    """Times a call by replaying a CUDA graph, or with events if it cannot be captured."""
    once = time_calls(lambda k: call(), "cuda", 0.005)
    if case.form == "layer":
        return time_calls(lambda k: call(), "cuda", BUDGET)
    try:
        return time_graph([call] * (20 if once.p50 < SHORT_CALL else 2), "cuda")
    except Exception:  # not capturable: a peer may wait for the host, or allocate
        torch.cuda.synchronize()
        return time_calls(lambda k: call(), "cuda", BUDGET)


def measure(case: Case, kernel: Any, peers: Iterable[str], speed: float) -> list[Row]:
    """Measures and prints our rows ("ours": method "auto") and those of all other providers."""
    rows: list[Row] = []
    moved, best = suite.bytes_moved(case), 0.0
    text = f"{case.name} {case.which}: floor {moved / speed * 1e-6:.4g} ms;"
    p = suite.draw(case)
    for provider in case.providers:
        if provider in suite.PEERS and provider not in peers:
            continue
        try:
            with torch.no_grad():
                call = suite.make(case, provider, p, kernel)
                error = error_of(case, provider, call, p)
                sample = time_provider(case, call)
        except Unavailable as reason:
            text += f" {provider}: {reason};"
            continue
        except Exception as reason:  # our times are kept if a peer fails
            if provider not in suite.OTHERS:
                raise
            text += (
                f" {provider}: {str(reason).splitlines()[0][:60] if str(reason) else type(reason)};"
            )
            continue
        bound = GATE[case.dtype] * (1 if case.which == "forward" else 2)
        if provider not in suite.OTHERS and error > bound:
            raise Wrong(f"{case.name} {provider}: error {error:.2g}, but {bound:.2g} is allowed")
        provider = "ours" if provider == "auto" else provider
        best = best or sample.p50
        rows.append(row(case, provider, sample, best, moved, speed, error))
        text += f" {provider} {sample.p50:.4g} (err {error:.1e})"
        if provider == "ours" and case.limit:
            text += f" <= {case.limit} {'holds' if sample.p50 <= case.limit else 'MISSED'}"
    print(text, flush=True)
    return rows


def row(
    case: Case, provider: str, sample: Sample, ours: float, moved: int, speed: float, error: float
) -> Row:
    row: Row = {"case": case.name, "op": case.op, "form": case.form, "pass": case.which}
    row |= {"provider": provider, "dtype": case.dtype, "B": case.batch, "T": case.steps, "N": 1}
    row |= {"D": case.width, "layers": 1, "directions": 1, "samples": sample.count}
    forward = case.which == "forward"
    values = {"p20_ms": sample.p20, "p50_ms": sample.p50, "p80_ms": sample.p80}
    values |= {"host_ms": sample.host, "peak_mib": sample.peak}
    values |= {"us_step": sample.p50 * 1e3 / case.steps, "tflops": math.nan}
    values |= {"gbps": moved / sample.p50 * 1e-6, "floor_ms": moved / speed * 1e-6}
    values |= {"ratio": sample.p50 / ours, "error_h": error if forward else math.nan}
    values |= {"error_grad": math.nan if forward else error}
    row |= {k: "" if math.isnan(v) else f"{v:.4g}" for k, v in values.items()}
    return row | {"limit_ms": case.limit if case.limit and provider == "ours" else "", "note": ""}


def run_suite(
    patterns: Callable[[Case], bool], kernel: Any, peers: Iterable[str], stamp: dict,
    save: Callable[[list[Row], str], Any],
) -> str:  # fmt: skip
    """Runs all cases that match `patterns`, then the studies; returns what is over its limit."""
    from bench.ops.pararnn_study import STUDIES

    speed, problems = copy_speed(), []
    print(f"copy {speed:.0f} GB/s")
    for case in [*suite.MUST, *suite.SCANS, *suite.SWEEP, *suite.CROSSOVER]:
        if not patterns(case):
            continue
        try:
            fresh = measure(case, kernel, peers, speed)
        except Exception as error:  # go on with the other cases
            problems.append(f"{case.name} {case.which}: {str(error)[:120]}")
            print(problems[-1], flush=True)
            continue
        save([row | stamp for row in fresh], "")
        problems += [
            f"{case.name} {r['pass']}: {r['p50_ms']} > {r['limit_ms']} ms"
            for r in fresh
            if r["limit_ms"] and float(r["p50_ms"]) > r["limit_ms"]
        ]
        torch.cuda.empty_cache()
    for name, study in STUDIES.items():
        if patterns(name):
            save([row | stamp for row in study(kernel)], "pararnn")
    return "\n".join(["not as it must be:", *problems]) if problems else ""
