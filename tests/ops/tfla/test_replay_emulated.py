"""Tests tfla's CUDA kernels of a step with a ring without a GPU, as test_emulated.py does."""

import pytest
import torch

from numerics import assert_bitwise
from ops.tfla import test_emulated as emulated
from ops.tfla import test_replay as tests
from ops.tfla.test_emulated import no_float64, order, tfla  # noqa: F401
from ops.tfla.test_replay import cell  # noqa: F401

pytestmark = emulated.pytestmark
FEW = (torch.bfloat16, torch.float32)


def check_orders(tfla, order, cell, case, dtype, device=""):  # noqa: F811
    """Both orders of threads and blocks, bitwise, and also without launches that overlap."""
    results = []
    for words in ("", " backwards", " arch=80"):
        order(device + words)
        results.append(tests.check(tfla, cell, case, dtype))
    for other in results[1:]:
        for key, value in results[0].items():
            assert_bitwise(key, other[key], value)


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", FEW, ids=tests.short)
@pytest.mark.parametrize("case", tests.CASES, ids=str)
def test_as_exact_as_steps_without_a_ring(tfla, order, cell, case, dtype):  # noqa: F811
    check_orders(tfla, order, cell, case, dtype)


@pytest.mark.parametrize("dtype", FEW, ids=tests.short)
@pytest.mark.parametrize(
    "case", [c for c in tests.CASES if (c.K, c.V) in ((128, 256), (256, 512))], ids=str
)
def test_enough_heads_for_a_thread_block_each(tfla, order, cell, case, dtype):  # noqa: F811
    check_orders(tfla, order, cell, case, dtype, "processors=1")


def test_steps_are_taken_back(tfla, order, cell):  # noqa: F811
    order("backwards")
    tests.test_steps_are_taken_back(tfla, cell)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_shut_gate_ends(tfla, cell, value):  # noqa: F811
    tests.test_what_a_shut_gate_ends(tfla, cell, value)


def test_wrong_rings_are_refused(tfla, cell):  # noqa: F811
    tests.test_wrong_rings_are_refused(tfla, cell)
