"""Tests fused-rnn's CUDA kernel for a backward pass whose recurrent gradient is cut, emulated."""

import os
import subprocess

import pytest

from emulate import HERE, SUPPORTED, build_program

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the emulator needs Linux on x86_64")
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "slstm")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(HERE / "cut.cu", tmp_path_factory.mktemp("emulator") / "cut")


@pytest.mark.parametrize("order", ["", "backwards"], ids=["forwards", "backwards"])
def test_it_is_the_loop(program, order):
    env = {**os.environ, "FLASHCELL_EMULATOR": order}
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=True)
    cases = [f"{d}{m}" for m in ("", " masked") for d in ("fp32", "fp16")]
    want = {f"{cell} {case}: right" for case in cases for cell in CELLS}
    assert set(done.stdout.splitlines()) == want
