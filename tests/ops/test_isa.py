"""Tests that every instruction set in the binary gives the reference's values, and that a missing
one is refused."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU")
TESTS = Path(__file__).parents[1]
FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
NEEDS = {"baseline": (), "avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512bw", "avx512vl")}
NEEDS["avx512_bf16"] = (*NEEDS["avx512"], "avx512_bf16")
if platform.machine() == "aarch64":  # under emulation /proc/cpuinfo is the host's
    FLAGS = "bf16" if ctypes.CDLL(None).getauxval(26) & 1 << 14 else ""  # AT_HWCAP2, HWCAP2_BF16
    NEEDS = {"baseline": (), "neon_bf16": ("bf16",)}
SUBSET = "B3T37 or B2T131 or test_step or B5T11 or B17 or D300 or D520 or B3T7 or test_values"
FILES = {
    "fused_rnn": ["tests/ops/fused_rnn/test_sequence.py"],
    "tfla": ["tests/ops/tfla/test_sequence.py"],
    "diagonal_rnn": [
        "tests/ops/diagonal_rnn/test_sequence.py",
        "tests/ops/diagonal_rnn/test_scan.py",
    ],
}


def one_step(isa, fused_rnn):
    """One step of an LSTM in another process, at the level `isa`."""
    code = (
        "import importlib, sys, torch; k = importlib.import_module(sys.argv[1]); "
        "k.lstm(torch.randn(1, 1, 4, 1, 4), torch.randn(4, 1, 4, 4))"
    )
    variant = Path(fused_rnn.__file__).parent
    env = {**os.environ, "FLASHCELL_CPU_ISA": isa, "PYTHONPATH": str(variant.parent)}
    command = [sys.executable, "-c", code, variant.name]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def run(isa, *arguments):
    env = {**os.environ, "FLASHCELL_CPU_ISA": isa}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", FILES)
@pytest.mark.parametrize("isa", NEEDS)
def test_values(isa, kernel, request):
    request.getfixturevalue(kernel)  # builds the kernel
    if not all(flag in FLAGS for flag in NEEDS[isa]):
        pytest.skip(f"this CPU has no {isa}")
    result = run(isa, *FILES[kernel], "-k", SUBSET)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout


@pytest.mark.parametrize("isa", NEEDS)
def test_a_missing_isa_is_refused(isa, fused_rnn):
    done = one_step(isa, fused_rnn)
    if all(flag in FLAGS for flag in NEEDS[isa]):
        assert done.returncode == 0, done.stderr
    else:
        assert f"FLASHCELL_CPU_ISA={isa}: this CPU lacks" in done.stderr


def test_unknown_isa_is_refused(fused_rnn):
    done = one_step("avx1024", fused_rnn)
    assert done.returncode != 0
    assert f"FLASHCELL_CPU_ISA=avx1024: must be {', '.join(list(NEEDS)[:-1])} or" in done.stderr
