"""Tests the cell structs alone by finite differences, compiled with g++ and nothing else."""

import subprocess
from pathlib import Path

import pytest

BUILDS = Path(__file__).resolve().parents[2] / "kernel_builds"
PROGRAMS = {
    "gradcheck.cpp": ("fused-rnn", ("lstm", "gru", "rnn_tanh", "rnn_relu", "slstm")),
    "diagonal_gradcheck.cpp": ("diagonal-rnn", ("flash_gru", "flash_lstm")),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_against_finite_differences(tmp_path, program):
    kernel, cells = PROGRAMS[program]
    binary, source = tmp_path / "gradcheck", Path(__file__).with_name(program)
    include = [f"-I{BUILDS / folder}" for folder in ("", f"{kernel}/csrc")]
    subprocess.run(["g++", "-std=c++20", "-O1", *include, source, "-o", binary], check=True)
    done = subprocess.run([binary], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    for name in cells:
        assert name in done.stdout
