"""scripts/fuzz: it finds nothing in the kernels, and finds what is planted in them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import _fuzz  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_rnn", "diagonal_rnn", "tfla")  # they build
KERNELS = ["diagonal-rnn", "fused-rnn", "tfla"]


def fuzz(
    calls: int, kinds: list[str], plant: str = "", kernels: list[str] = KERNELS, seed: int = 0
):
    folder = ROOT / "kernel_builds"
    chosen = kernels is not KERNELS
    options = _fuzz.Options(calls, seed, kinds, kernels, folder, chosen, plant=plant)
    report = _fuzz.run(options)
    return report, _fuzz.summary(options, report, 1.0)


def test_a_few_calls_find_nothing():
    report, text = fuzz(400, ["doors", "raw"])
    assert report.calls == 400
    assert report.accepted > 100
    assert report.refused > 100
    assert not report.findings, text


DOOR = (
    "for n, d in enumerate(fuzzer.doors):\n    {}\n    fuzzer.doors[n] = (*d[:2], faulty, d[3])\n"
)
WRAP = "def faulty(*a, f=d[2], **k):\n        r = f(*a, **k)\n        {}\n    faulty.__signature__ = inspect.signature(d[2])"
PLANTED = {  # what a door does: what the fuzzer says of it
    "a wrong value": ("return r * 1.001 if torch.is_tensor(r) and r.dtype.is_floating_point else r", "rms error"),
    "a crash": ("os.kill(os.getpid(), 11)", "ends with SIGSEGV"),
    "another exception": ("raise KeyError('x')", "KeyError"),
    "no name": ("raise ValueError('wrong input')", "names no argument"),
    "internal text": ("raise RuntimeError('x is wrong, csrc/ops.cpp:7')", "internal text"),
    "memory that nobody wrote": ("return torch.empty_like(r) if torch.is_tensor(r) else r", "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_found(fault):
    line, text = PLANTED[fault]
    plant = "import inspect, os\n" + DOOR.format(WRAP.format(line))
    report, found = fuzz(30, ["doors"], plant, ["diagonal-rnn"])
    assert text in found
    assert report.calls == 30, "the calls after it ran"
    assert f"--only {report.findings[0]['index']}" in found


def test_a_raw_op_that_reads_what_nobody_wrote_is_found():
    plant = (
        "import _fuzz_raw\nresults = _fuzz_raw.results\n"
        "def faulty(op, call):\n    named = results(op, call)\n"
        "    return {n: torch.empty_like(t) if n.startswith('result') else t for n, t in named.items()}\n"
        "_fuzz_raw.results = faulty\n"
    )
    _, found = fuzz(40, ["raw"], plant, ["fused-rnn"])
    assert "is not that of plain copies" in found


def test_an_op_without_a_maker_is_an_error():
    command = [sys.executable, "-c", "import torch, types, _fuzz_calls as c;"
               "k = types.ModuleType('k'); k.__all__ = ['fresh'];"
               "exec('def fresh(x): pass', k.__dict__); c.doors(k)"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True)
    assert done.returncode == 1
    assert "makes no call of fresh" in done.stderr


def test_the_script_says_what_it_did():
    command = [
        sys.executable,
        ROOT / "scripts/fuzz",
        "--calls",
        "20",
        "--doors",
        "--kernel",
        "tfla",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("20 calls in ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_twenty_thousand_calls_find_nothing(seed):
    report, text = fuzz(5000, ["doors", "raw"], seed=1 + seed)
    assert report.calls == 5000
    assert not report.findings, text
