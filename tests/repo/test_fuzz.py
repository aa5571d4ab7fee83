"""Tests scripts/fuzz: it finds nothing in the kernels, and finds what is planted in them."""

import subprocess
import sys
from pathlib import Path

import pytest

from fuzzing import driver

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("fused_rnn", "diagonal_rnn", "tfla")  # these fixtures build
KERNELS = ["diagonal-rnn", "fused-rnn", "tfla"]


def fuzz(
    calls: int, kinds: list[str], plant: str = "", kernels: list[str] = KERNELS, seed: int = 0
):
    folder = ROOT / "kernel_builds"
    chosen = kernels is not KERNELS
    options = driver.Options(calls, seed, kinds, kernels, folder, chosen, plant=plant)
    report = driver.run(options)
    return report, driver.summary(options, report, 1.0)


def test_a_few_calls_find_nothing():
    report, text = fuzz(300, ["entries", "raw"])
    assert report.calls == 300
    assert report.accepted > 80
    assert report.refused > 80
    assert not report.findings, text


PLANT = """
import inspect, itertools, os
calls = itertools.count(1)  # starts again after a crash

def changed(value, change):
    if isinstance(value, tuple):
        return tuple(changed(v, change) for v in value)
    return change(value) if torch.is_tensor(value) and value.is_floating_point() else value

def spoilt(entry):
    def faulty(*args, **kwargs):
        kind = next(calls) % 6
        if kind == 0:
            os.kill(os.getpid(), 11)
        if kind == 1:
            raise KeyError("x")
        if kind == 2:
            raise ValueError("wrong input")
        if kind == 3:
            raise RuntimeError("x is wrong, csrc/ops.cpp:7")
        change = (lambda t: t * 1.001) if kind == 4 else torch.empty_like
        return changed(entry(*args, **kwargs), change)
    faulty.__signature__ = inspect.signature(entry)
    return faulty

fuzzer.entries = [(k, n, spoilt(d), r) for k, n, d, r in fuzzer.entries if n in ("linear_scan", "causal_conv")]
"""
SAID = ("SIGSEGV", "KeyError", "names no argument", "internal text", "rms error", "not finite")


def test_what_is_planted_is_found_and_the_calls_after_it_run():
    report, found = fuzz(90, ["entries"], PLANT, ["diagonal-rnn"])
    assert report.calls == 90
    for text in SAID:
        assert text in found
    assert f"--only {report.findings[0]['index']}" in found


SMALL = """
import inspect

def changed(value, change):
    if isinstance(value, tuple):
        return tuple(changed(v, change) for v in value)
    return change(value) if torch.is_tensor(value) and value.is_floating_point() else value

def last_row(change):  # changes a tensor, or the last in a tuple
    def spoil(t):
        if t.dim() and t.numel():
            t = t.clone()
            t[-1] = change(t[-1])
        return t
    return spoil

class Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient

def gradient_of(name):
    def spoil(entry, call):
        x = call[name]
        is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.requires_grad
        return entry(**{**call, name: Gradient.apply(x)} if is_plain else call)
    return spoil

def scribble(entry, call):
    result, x = entry(**call), call["x"]
    if x.requires_grad and x.numel():
        x.data.mul_(2)  # autograd does not see it
    return result

def strict(entry, call):
    for name, x in call.items():
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_contiguous():
            raise ValueError(f"{name} is strided, but must be contiguous")
    return entry(**call)

result = lambda change: lambda entry, call: changed(entry(**call), change)
FAULTS = {
    "linear": gradient_of("weight"),
    "linear_scan": gradient_of("a"),
    "mlstm": gradient_of("k"),
    "headwise_linear": result(lambda t: t.flip(0) if t.dim() else t),
    "causal_conv": result(last_row(lambda row: row * float("nan"))),
    "mlstm_step": result(last_row(lambda row: row + 0.01)),
    "gru": result(lambda t: t.float().to(t.dtype)),
    "norm_step": result(torch.nan_to_num),
    "gate_step": result(torch.nan_to_num),
    "rnn": scribble,
    "slstm": strict,
    "lstm": strict,
    "recurrent": strict,
}

def spoilt(name, entry):
    faulty = lambda **call: FAULTS[name](entry, call)
    faulty.__signature__ = inspect.signature(entry)
    return faulty

fuzzer.entries = [(k, n, spoilt(n, d), r) for k, n, d, r in fuzzer.entries if n in FAULTS]
"""
SMALL_FAULTS = {
    "linear": "gradient of weight",
    "linear_scan": "gradient of a",
    "mlstm": "gradient of k",
    "headwise_linear": "rms error",
    "causal_conv": "is not finite where the reference is",
    "mlstm_step": "rms error",
    "gru": "float64: rms error",
    "norm_step gate_step": "finite where the reference is NaN",
    "rnn": "x torch.float",
    "slstm lstm recurrent": "is strided, but must be contiguous",
}


def test_small_faults_are_found():
    """1e-3 of a gradient, swapped rows, one row that is NaN or 0.01 off, float64 in fewer digits,
    NaN made a number, an input overwritten, strides refused: within the number of calls that
    2,000 calls give each function."""
    report, text = fuzz(65 * 13, ["entries"], SMALL)
    found = [(f["title"].partition("(")[0], f["problem"]) for f in report.findings]
    for entries, says in SMALL_FAULTS.items():
        own = [problem for name, problem in found if name in entries.split()]
        assert any(says in problem for problem in own), (entries, text)


def test_a_raw_op_that_reads_what_nobody_wrote_is_found():
    plant = (
        "from fuzzing import raw\nresults = raw.results\n"
        "def faulty(op, call):\n    named = results(op, call)\n"
        "    return {n: torch.empty_like(t) if n.startswith('result') else t for n, t in named.items()}\n"
        "raw.results = faulty\n"
    )
    _, found = fuzz(40, ["raw"], plant, ["fused-rnn"])
    assert "is not that of plain copies" in found


def test_an_op_without_a_maker_is_an_error():
    command = [sys.executable, "-c", "import torch, types; from fuzzing import calls as c;"
               "k = types.ModuleType('k'); k.__all__ = ['fresh'];"
               "exec('def fresh(x): pass', k.__dict__); c.entries(k)"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True)
    assert done.returncode == 1
    assert "makes no call of fresh" in done.stderr


def test_the_script_says_what_it_did():
    command = [
        sys.executable,
        ROOT / "scripts/fuzz",
        "--calls",
        "20",
        "--entries",
        "--kernel",
        "tfla",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("20 calls in ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_twenty_thousand_calls_find_nothing(seed):
    report, text = fuzz(5000, ["entries", "raw"], seed=1 + seed)
    assert report.calls == 5000
    assert not report.findings, text
