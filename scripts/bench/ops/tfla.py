"""Times the mLSTM against other providers on a GPU, for bench_ops --suite tfla.

"forward" keeps what the backward needs, "train" is forward and the gradients of all inputs, between
CUDA events. A step runs as a CUDA graph of many, each with a state of its own that is not in the L2.
The error is against float64 on the case's first steps; of providers that compute something else (other
linear attention, softmax) there is none. A provider that cannot run has rows without times: why not is
their note.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.suites.tfla import cases_cuda as suite
from bench.suites.tfla.cases_cuda import LEAVES, Case, Provider
from bench.timing import NOT_TIMED, Sample, copies_beyond_l2, time_calls, time_graph
from flashcell.kernels import tfla as reference
from measurement.record import Row, first_line

JUDGED = 512  # steps of one sequence whose values are checked
GATE = {"h": 3e-3, "q": 3e-3, "k": 3e-3, "v": 3e-3, "i": 4e-3, "f": 1e-2}  # relative errors
LONGEST_PASS = 1.3  # times as long as the same tokens in sequences of 8192
FIRST_CALL = 1.0  # seconds: the binary is loaded, and a small call and its gradient have ended
GRAPH_STEPS = 64  # at least: the launch of a graph of 16 is 0.27 us of a step of B 8
EAGER = "its functions for torch.compile ran without"  # a note in the table
Outcomes = dict[str, Sample | str]  # pass -> its time, or why there is none


class Wrong(Exception):
    """A provider's values differ from float64's; it is not timed."""


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def first_call(kernel: Any, start: float) -> float:
    """Makes a first, small call with its gradient; returns the seconds since `start`."""
    p = suite.draw(Case("exp", 1, 64, 64, 1, 128))
    inputs = [p[n].requires_grad_() for n in LEAVES]
    torch.autograd.grad(kernel.mlstm(*inputs)[0], inputs, p["dh"])[0].sum().item()
    return time.perf_counter() - start


def leaves_of(provider: Provider, p: dict) -> tuple[dict, torch.Tensor]:
    p = provider.native(p)
    dh = p.pop("dh")
    return {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in p.items()}, dh


def errors_of(case: Case, provider: Provider, ours: bool) -> dict[str, float]:
    """Returns a provider's relative errors against float64: of h, and for ours of all gradients."""
    steps = min(max(JUDGED, case.chunk or 0), case.steps)  # peers refuse less than a chunk
    short = Case(case.gate, case.heads, case.key, case.value, 1, steps, case.chunk)
    p = suite.draw(short)
    inputs, dh = leaves_of(provider, p)
    h = provider.call(inputs)
    wide = {n: p[n].double().requires_grad_() for n in LEAVES}
    exact, _ = reference.mlstm(
        *(wide[n] for n in LEAVES), input_gate=case.gate, backend="reference"
    )
    errors = {"h": gap(provider.h(h), exact)}
    if ours:
        got = torch.autograd.grad(h, [inputs[n] for n in LEAVES], dh)
        want = torch.autograd.grad(exact, list(wide.values()), p["dh"].double())
        errors |= {n: gap(a, b) for n, a, b in zip(LEAVES, got, want, strict=True)}
        over = {n: e for n, e in errors.items() if not e <= GATE[n]}
        if over:
            raise Wrong(f"errors {over}, but {GATE} is allowed")
    return errors


def time_passes(provider: Provider, p: dict, budget: float) -> Outcomes:
    inputs, dh = leaves_of(provider, p)
    wanted = [t for t in inputs.values() if t.requires_grad]

    def train(k: int) -> Any:
        return torch.autograd.grad(provider.call(inputs), wanted, dh, allow_unused=True)

    forward = time_calls(lambda k: provider.call(inputs), "cuda", budget)
    try:
        return {"forward": forward, "train": time_calls(train, "cuda", budget)}
    except Exception as reason:  # a peer may have no backward here; its forward counts
        return {"forward": forward, "train": first_line(reason)}


def measure(case: Case, kernel: Any, peers: Iterable[str], budget: float) -> list[Row]:
    """Measures and prints our rows and those of every peer that runs here."""
    print(f"{case.name} ({case.of})", flush=True)
    rows: list[Row] = []
    ours: Outcomes = {}
    p = None if case.steps == 1 else suite.draw(case)
    for name in ("ours", *(provider for provider in case.providers if provider in peers)):
        try:
            outcomes, errors = run_provider(case, name, kernel, p, budget)
        except Exception as reason:  # our times are kept if a peer fails
            if name == "ours":
                raise
            outcomes, errors = dict.fromkeys(case.passes, first_line(reason)), {}
        ours = ours or outcomes
        for which, outcome in outcomes.items():
            if isinstance(outcome, str):
                if name == "ours":
                    raise RuntimeError(f"{which}: {outcome}")
                torch.cuda.empty_cache()
                print(f"  {name:19} {which:8} {outcome}", flush=True)
            else:
                print_row(case, name, which, outcome, errors)
            rows.append(row(case, name, which, outcome, ours[which], errors))
    return rows


def run_provider(
    case: Case, name: str, kernel: Any, p: dict | None, budget: float
) -> tuple[Outcomes, dict[str, float]]:
    if p is None:
        count = copies_beyond_l2(4 * case.batch * case.heads * case.key * case.value)
        steps = [suite.STEP_CALLS[name](case, kernel) for _ in range(max(2, count))]
        with torch.no_grad():
            return {"step": time_graph(steps * -(-GRAPH_STEPS // len(steps)), "cuda")}, {}
    provider = suite.make(case, name, kernel)
    errors = errors_of(case, provider, name == "ours") if provider.exact else {}
    torch.compiler.reset()  # so that a peer compiles for the timed shape alone
    return time_passes(provider, p, budget), errors


def print_row(case: Case, name: str, which: str, sample: Sample, errors: dict) -> None:
    limit = case.limit(which) if name == "ours" else None
    text = f"  {name:19} {which:8} {sample.p50:8.4g} ms"
    text += f"  {suite.floor_ms(case, which) / sample.p50:4.0%} of floor"
    if which != "step":
        text += f"  peak {sample.peak / 1024:.2f} GiB  "
        text += " ".join(f"{n} {e:.1e}" for n, e in errors.items())
    if limit:
        text += f"  <= {limit} {'holds' if sample.p50 <= limit else 'MISSED'}"
    print(text, flush=True)


def row(
    case: Case, provider: str, which: str, outcome: Sample | str, ours: Sample | str,
    errors: dict[str, float],
) -> Row:  # fmt: skip
    timed = isinstance(outcome, Sample)
    sample = outcome if timed else NOT_TIMED
    row: Row = {
        "case": case.name,
        "op": "mlstm",
        "form": case.of,
        "pass": which,
        "provider": provider,
    }
    row |= {"dtype": "bfloat16", "B": case.batch, "T": case.steps, "N": case.heads}
    row |= {"D": case.value, "layers": 1, "directions": 1, "samples": sample.count}
    floor = suite.floor_ms(case, which)
    gradients = [e for n, e in errors.items() if n != "h"]
    values = {"p20_ms": sample.p20, "p50_ms": sample.p50, "p80_ms": sample.p80}
    values |= {"host_ms": sample.host, "peak_mib": sample.peak}
    flops, moved = suite.work(case, which)
    values |= {"us_step": sample.p50 * 1e3 / case.steps}
    values |= {"tflops": flops / sample.p50 * 1e-9, "gbps": moved / sample.p50 * 1e-6}
    values |= {"floor_ms": floor, "ratio": sample.p50 / getattr(ours, "p50", math.nan)}
    values |= {"error_h": errors.get("h", math.nan), "error_grad": max(gradients, default=math.nan)}
    row |= {k: "" if math.isnan(v) else f"{v:.4g}" for k, v in values.items()}
    row |= {"limit_ms": (case.limit(which) or "") if provider == "ours" else ""}
    eager = provider.startswith("mlstm_kernels") and os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    return row | {"note": EAGER * eager if timed else outcome}


def gigabytes(row: Row) -> float:
    return float(row["peak_mib"]) * 2**20 / 1e9


def uneven(lengths: dict[int, dict[str, float]]) -> list[str]:
    """Returns the lengths whose time per token is too long compared with 8192's."""
    base = lengths.get(8192, {})
    return [
        f"T {T} {which}: {ms:.4g} ms, more than {LONGEST_PASS} of {base[which]:.4g}"
        for T, times in lengths.items()
        for which, ms in times.items()
        if which in base and ms > LONGEST_PASS * base[which]
    ]


def run_suite(
    takes: Callable[[Case], bool], kernel: Any, peers: Iterable[str], stamp: dict, budget: float,
    save: Callable[[list[Row]], Any],
) -> str:  # fmt: skip
    """Runs all selected cases; returns what is over its limit."""
    problems: list[str] = []
    lengths: dict[int, dict[str, float]] = {}
    for case in filter(takes, suite.CASES):
        try:
            rows = measure(case, kernel, peers, budget)
        except Exception as error:  # go on with the other cases
            problems.append(f"{case.name}: {first_line(error)}")
            print(problems[-1], flush=True)
            continue
        save([row | stamp for row in rows])
        for r in (r for r in rows if r["provider"] == "ours"):
            ms = float(r["p50_ms"])
            if case.of == "lengths":
                lengths.setdefault(case.steps, {})[r["pass"]] = ms
            if r["limit_ms"] and ms > r["limit_ms"]:
                problems.append(f"{case.name} {r['pass']}: {ms} > {r['limit_ms']} ms")
            if case.memory and r["pass"] == "train" and gigabytes(r) > case.memory:
                problems.append(f"{case.name}: {gigabytes(r):.2f} > {case.memory} GB")
        torch.cuda.empty_cache()
    problems += uneven(lengths)
    return "\n".join(["not as it must be:", *problems]) if problems else ""
