"""Times all providers of each case on a GPU in one run, after a check of our values."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.suites.fused_rnn.case import Case
from bench.suites.fused_rnn.cases_cuda import parameters, passes, work
from bench.suites.fused_rnn.peers import make_peer
from bench.suites.fused_rnn.providers_cuda import (
    Provider,
    Unavailable,
    make_exact,
    make_ours,
    make_steps,
)
from bench.timing import NOT_TIMED, Sample, copies_beyond_l2, time_calls, time_graph
from flashcell.kernels import fused_rnn as reference
from measurement.record import Row, first_line

GATE_STEPS = 64
# Largest relative error (Frobenius norm, against float64 on the same inputs) of h, times the root
# of the number of layers. A gradient may have twice that: bf16 in a loop with fp32 sums has 2.0e-3
# for h and 3.3e-3 for dw_hh.
GATE = {"bfloat16": 3.5e-3, "float16": 5e-4, "tf32": 5e-4, "float32": 2e-6}
NO_ERRORS = math.nan, math.nan


class Wrong(Exception):
    """A provider's values differ from float64's; it is not timed."""


def run(provider: Provider, which: str, x: torch.Tensor, dh: torch.Tensor) -> list[torch.Tensor]:
    """Runs the timed call of a provider: returns h, and for "train" the gradients of x and its
    leaves."""
    if which == "inference":
        with torch.no_grad():
            return [provider(x)]
    h = provider(x)
    if which == "forward":
        return [h]
    return [h, *torch.autograd.grad(h, [x, *provider.leaves], dh)]


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


class Bench:
    """Benchmarks one kernel on one device; `tiny` shrinks the cases so that they run without a
    GPU."""

    def __init__(self, kernel: Any, device: str, budget: float = 0.25, tiny: bool = False):
        self.kernel, self.device, self.budget, self.tiny = kernel, device, budget, tiny
        self.backend = "reference" if kernel is reference else device
        self.exact: list[torch.Tensor] = []  # h and dx of the last check

    def first_call(self, start: float) -> float:
        """Makes a first, small call; returns the seconds since `start`."""
        x, w = (torch.ones(s, device=self.device) for s in ((1, 2, 4, 1, 64), (4, 1, 64, 64)))
        self.kernel.lstm(x.bfloat16(), w.bfloat16())[0].sum().item()
        return time.perf_counter() - start

    def measure(self, case: Case, peers: list[str]) -> list[Row]:
        """Measures and prints our row and that of every peer that runs here; returns them."""
        if self.tiny:
            case = case.short(steps=3, batch=2)
        tf32 = "tf32" if case.dtype == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = tf32
        torch.backends.cudnn.rnn.fp32_precision = tf32
        step = case.is_step
        errors = self.check_step(case, "ours") if step else self.check(case)
        rows: list[Row] = []
        best: dict[str, Sample] = {}
        for name in ["ours", *(peer for peer in case.peers if peer in peers)]:
            try:
                if name != "ours":
                    errors = self.check_step(case, name) if step else self.check_peer(case, name)
                samples = self.time_steps(case, name) if step else self.time(case, name)
            except Exception as reason:  # our times are kept if a peer fails
                if name == "ours":
                    raise
                note = first_line(reason)
                print(f"  {name:11} {note}", flush=True)
                samples = dict.fromkeys(best, NOT_TIMED)
                rows += [self.row(case, name, k, samples, best, NO_ERRORS, note) for k in samples]
                continue
            if name == "ours":
                best = samples
            if self.tiny:
                print(f"  {name:11} err " + " ".join(f"{e:.1e}" for e in errors), flush=True)
                continue
            rows += [self.row(case, name, which, samples, best, errors) for which in samples]
            print_provider(case, name, samples, best, errors)
        return rows

    def provider(self, case: Case, name: str, p: dict[str, torch.Tensor]) -> Provider:
        if name == "ours":
            return make_ours(case, p, self.kernel, self.backend)
        return make_peer(name, case, p)

    def check(self, case: Case) -> tuple[float, float]:
        """Returns our errors of h and of the worst gradient in a short run; raises Wrong if too
        large."""
        case = case.short(GATE_STEPS)
        p = parameters(case, self.device, seed=1)
        ours = make_ours(case, p, self.kernel, self.backend)
        exact = make_exact(case, p, reference)
        got, want = (self.values(provider, p) for provider in (ours, exact))
        gaps = [gap(a, b) for a, b in zip(got, want, strict=True)]
        h, worst = gaps[0], max(gaps[1:])
        bound = GATE[case.dtype] * math.sqrt(case.layers)
        if not (h <= bound and worst <= 2 * bound):
            raise Wrong(
                f"errors {h:.2g} of h, {worst:.2g} of gradients, but {bound:.2g} is allowed"
            )
        self.exact = want[:2]
        return h, worst

    def values(self, provider: Provider, p: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        wide = provider.leaves[0].dtype if provider.leaves else p["x"].dtype
        x = provider.native(p["x"].to(wide)).detach().requires_grad_()
        h, dx, *rest = run(provider, "train", x, provider.native_dh(p["dh"].to(wide)))
        return [provider.h(h).detach(), provider.dx(dx), *rest]

    def check_peer(self, case: Case, name: str) -> tuple[float, float]:
        """Returns a peer's errors of h and of dx, on the inputs of our check."""
        case = case.short(GATE_STEPS)
        p = parameters(case, self.device, seed=1)
        peer = make_peer(name, case, p)
        if not peer.comparable:
            return NO_ERRORS
        h, dx, *_ = self.values(peer, p)
        return gap(h, self.exact[0]), gap(dx, self.exact[1])

    def check_step(self, case: Case, name: str) -> tuple[float, float]:
        """Returns a step's errors of h and of the next states; raises Wrong if ours are too
        large."""
        p = parameters(case, self.device, seed=1)
        wide = {k: v.double() for k, v in p.items()}
        with torch.no_grad():
            got = make_steps(name, case, p, self.kernel, 1)[0]()
            want = make_steps("ours", case, wide, reference, 1)[0]()
        gaps = [gap(a, b) for a, b in zip(got, want, strict=True)]
        if name == "ours" and not max(gaps) <= GATE[case.dtype]:
            raise Wrong(f"error {max(gaps):.2g}, but {GATE[case.dtype]:.2g} is allowed")
        return gaps[0], max(gaps[1:])

    def time(self, case: Case, name: str) -> dict[str, Sample]:
        p = parameters(case, self.device)
        provider = self.provider(case, name, p)
        x, dh = provider.native(p["x"]), provider.native_dh(p["dh"])
        count = 1 if self.tiny else copies_beyond_l2(x.nbytes + dh.nbytes)
        sets = [(x.clone().detach().requires_grad_(), dh.clone()) for _ in range(count)]
        samples = {}
        for which in passes(case):
            provider.train(which != "inference")
            call = lambda k, which=which: run(provider, which, *sets[k % count])
            samples[which] = time_calls(call, self.device, self.budget)
        return samples

    def time_steps(self, case: Case, name: str) -> dict[str, Sample]:
        p = parameters(case, self.device)
        weights = sum(p[k].nbytes for k in ("w_ih", "w_hh") if k in p)
        count = 2 if self.tiny else max(16, copies_beyond_l2(weights))
        with torch.no_grad():
            return {"step": time_graph(make_steps(name, case, p, self.kernel, count), self.device)}

    def row(
        self, case: Case, name: str, which: str, samples: dict[str, Sample], ours: dict[str, Sample],
        errors: tuple[float, float], note: str = "",
    ) -> Row:  # fmt: skip
        sample, (flops, moved, floor) = samples[which], work(case, which)
        comparable = name != "sdpa"
        row = {
            "case": case.name,
            "op": case.cell,
            "form": case.form,
            "pass": which,
            "provider": name,
        }
        row |= {"dtype": case.dtype, "B": case.batch, "T": case.steps, "N": case.heads}
        row |= {"D": case.width, "layers": case.layers, "directions": case.directions}
        values = {"p20_ms": sample.p20, "p50_ms": sample.p50, "p80_ms": sample.p80}
        values |= {"host_ms": sample.host, "peak_mib": sample.peak}
        values |= {"us_step": step_microseconds(case, which, samples)}
        values |= {"tflops": flops / sample.p50 / 1e9 if comparable else math.nan}
        values |= {"gbps": moved / sample.p50 / 1e6 if comparable else math.nan}
        values |= {"floor_ms": floor * 1e3, "ratio": sample.p50 / ours[which].p50}
        values |= {"error_h": errors[0], "error_grad": errors[1]}
        row |= {"samples": sample.count}
        row |= {k: "" if math.isnan(v) else f"{v:.4g}" for k, v in values.items()}
        limit = case.limit(which) if name == "ours" else None
        return row | {"limit_ms": "" if limit is None else limit, "note": note}


def step_microseconds(case: Case, which: str, samples: dict[str, Sample]) -> float:
    """Returns microseconds per step of the forward, or for "train" of the backward alone."""
    time = samples[which].p50 - (samples["forward"].p50 if which == "train" else 0.0)
    return time * 1e3 / case.steps


def floor_microseconds(case: Case, which: str) -> float:
    seconds = work(case, which)[2] - (work(case, "forward")[2] if which == "train" else 0.0)
    return seconds * 1e6 / case.steps


def print_provider(case: Case, name: str, samples, ours, errors: tuple[float, float]) -> None:
    """Prints a provider's line: times, us per step over the floor, fraction of it, errors,
    ratios."""
    step = "step" in samples
    unit, scale = ("us", 1e3) if step else ("ms", 1.0)
    text = f"  {name:11}" + "".join(f"{s.p50 * scale:8.4g} " for s in samples.values()) + unit
    for which in ("step",) if step else ("forward", "train"):
        took, floor = step_microseconds(case, which, samples), floor_microseconds(case, which)
        text += f"{took:8.3g}us"
        text += f"/{floor:<5.3g}{floor / max(took, 1e-9):4.0%}" if name == "ours" else " " * 10
    text += "  err " + " ".join(f"{e:.1e}" for e in errors)
    for which, sample in samples.items():
        limit = case.limit(which)
        if name != "ours":
            text += f"  {which} {sample.p50 / ours[which].p50:.2f}x"
        elif limit is not None:
            verdict = "MISSED" if sample.p50 > limit else "holds"
            text += f"  {which} <= {limit * scale:g} {verdict}"
    print(text, flush=True)
    if name == "ours":
        spread = ("/".join(f"{t * scale:.4g}" for t in s[:3]) for s in samples.values())
        print(f"  p20/50/80   {'  '.join(spread)} {unit}")


def run_cases(
    cases: list[Case],
    peers: list[str],
    bench: Bench,
    stamp: dict[str, str],
    save: Callable[[list[Row]], Any],
) -> str:
    """Measures all cases, saving rows as they come; returns what is wrong or over its limit."""
    problems: list[str] = []
    print(
        "  provider         infer  forward    train    forward/floor, share   backward/floor, share"
    )
    for case in cases:
        print(f"{case.name}  {case.dtype} B{case.batch} T{case.steps} {case.heads}x{case.width}")
        try:
            fresh = bench.measure(case, peers)
        except Unavailable as reason:
            print(f"  skipped: {reason}", flush=True)
            continue
        except Exception as error:  # go on with the other cases
            print(f"  NOT TIMED: {first_line(error)}", flush=True)
            problems.append(f"{case.name}: {first_line(error)[:80]}")
            continue
        if fresh:
            save([row | stamp for row in fresh])
        problems += [
            f"{case.name} {row['pass']}: {row['p50_ms']} > {row['limit_ms']} ms"
            for row in fresh
            if row["p50_ms"] and row["limit_ms"] and float(row["p50_ms"]) > row["limit_ms"]
        ]
    return "\n".join(["not as it must be:", *problems]) if problems else ""
