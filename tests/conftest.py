"""Fixtures: the built kernels, a fixed seed, and memory that is NaN until it is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradients
from cases import DEVICE
from tooling import thinning

ROOT = Path(__file__).resolve().parents[1]
torch.set_default_device(DEVICE)
# One thread also in the processes that tests start: two in each of pytest-xdist's workers would mostly
# wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What an op allocates is NaN until it writes it. It is read once, when the op first allocates.
os.environ.setdefault("FLASHCELL_FILL_MEMORY", "1")


def pytest_addoption(parser):
    said = "of the tests that differ in their parameters alone, all but the first are slow"
    parser.addoption("--one-of-each", action="store_true", help=said)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    thinning.mark_rest_slow(items, config.getoption("one_of_each"))


def load_built(name: str, finished: str | None):
    """Loads the binary for DEVICE as the Hub's would be: the `finished` build, or one from this
    tree, which is built if it is not up to date."""
    from kernels import get_local_kernel

    if finished is None:
        build = [sys.executable, ROOT / "scripts/build_kernels", "--here"]
        subprocess.run([*build, "--kernel", name, "--backend", DEVICE], check=True)
    kernel = get_local_kernel(Path(finished or ROOT / "kernel_builds" / name), backend=DEVICE)
    # A package that this process has imported before is a new module, but its submodules, which are
    # not imported again, do not become its attributes.
    for name, module in list(sys.modules.items()):
        parent, _, child = name.rpartition(".")
        if parent == kernel.__name__ and not hasattr(kernel, child):
            setattr(kernel, child, module)
    return kernel


@pytest.fixture(scope="session")
def fused_rnn():
    """fused-rnn; FLASHCELL_TEST_KERNEL names a finished build, to test it under another torch."""
    return load_built("fused-rnn", os.environ.get("FLASHCELL_TEST_KERNEL"))


@pytest.fixture(scope="session")
def diagonal_rnn():
    return load_built("diagonal-rnn", os.environ.get("FLASHCELL_TEST_DIAGONAL_KERNEL"))


@pytest.fixture(scope="session")
def tfla():
    return load_built("tfla", os.environ.get("FLASHCELL_TEST_TFLA_KERNEL"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, whatever number the test before has set: the problems are too small for two."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_precision():
    """Restores how cuDNN rounds the products of RNNs in fp32, which our tools set for their process."""
    switch = torch.backends.cudnn.rnn
    before = switch.fp32_precision
    yield
    if switch.fp32_precision != before:
        switch.fp32_precision = before


@pytest.fixture(autouse=True)
def disjoint_gradients():
    """Fails a test if two gradients that any backward returns share memory."""
    with gradients.checked():
        yield


@pytest.fixture
def poisoned():
    """Fills torch.empty with NaN, so that elements which are never written show up. Memory that an op
    allocates itself is filled by FLASHCELL_FILL_MEMORY."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
