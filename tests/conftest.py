"""Fixtures: the built kernel, a fixed seed, and memory that is NaN until something writes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import DEVICE

ROOT = Path(__file__).resolve().parents[1]
torch.set_default_device(DEVICE)
if DEVICE != "cpu":
    torch.set_num_threads(1)  # the GPU is what is tested, by many processes at a time


@pytest.fixture(scope="session")
def fused_rnn():
    """The binary for DEVICE, built from this tree if it is not up to date, loaded as the Hub's would
    be."""
    from kernels import get_local_kernel

    path = os.environ.get(
        "FLASHCELL_TEST_KERNEL"
    )  # a finished build, to try it under another torch
    if path is None:
        build = [sys.executable, ROOT / "scripts/build_kernels", "--here"]
        subprocess.run([*build, "--kernel", "fused-rnn", "--backend", DEVICE], check=True)
        path = ROOT / "kernel_builds/fused-rnn"
    return get_local_kernel(Path(path), backend=DEVICE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """torch.empty is filled with NaN, also inside the ops: what nobody writes shows up."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
