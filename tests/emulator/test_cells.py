"""Tests fused-rnn's CUDA kernel for one step on tensor cores, emulated."""

import itertools
import os
import subprocess

import pytest

from emulate import HERE, SUPPORTED, build_program

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the emulator needs Linux on x86_64")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(HERE / "cells.cu", tmp_path_factory.mktemp("emulator") / "cells")


@pytest.mark.parametrize("order", ["", "backwards", "early"])
def test_it_is_the_loop(program, order):
    env = {**os.environ, "FLASHCELL_EMULATOR": order}
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=True)
    kinds = itertools.product((4, 3, 1), (16, 8, 4), ("bf16", "fp16"))
    want = {f"{gates} gates, {piece}, {dtype}: right" for gates, piece, dtype in kinds}
    assert set(done.stdout.splitlines()) == want
