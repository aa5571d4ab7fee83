"""Runs ops/tfla/test_gates.py without a GPU: tests/emulator runs tfla's CUDA kernels."""

import pytest
import torch

from ops.tfla import test_gates as tests
from ops.tfla.test_emulated import (  # noqa: F401  (fixtures)
    DTYPES,
    no_float64,
    order,
    pytestmark,
    tfla,
)

PATHS = [(torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "arch=80")]  # "": with wgmma


@pytest.mark.thin
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize(("size", "gate"), [(64, 12.0), (128, 6.0), (256, 12.0), (256, 20.0)])
@pytest.mark.parametrize("cell", tests.CELLS, ids=str)
def test_forget_gates_of_both_signs(tfla, order, cell, size, gate, path):  # noqa: F811
    dtype, device = path
    order(device)
    tests.check(tfla, cell, 301, gate, dtype, backend="cpu", chunk_size=size)


@pytest.mark.thin
@pytest.mark.parametrize("mean", [-0.9, 0.5])
@pytest.mark.parametrize("cell", tests.CELLS, ids=str)
def test_forget_gates_that_are_half_open(tfla, order, cell, mean):  # noqa: F811
    order("")
    tests.check_half_open(tfla, cell, mean, backend="cpu", chunk_size=128)


@pytest.mark.thin
@pytest.mark.parametrize("masks", tests.MASKS, ids=str)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("cell", tests.CELLS, ids=str)
def test_forget_gates_with_masks(tfla, order, cell, path, masks):  # noqa: F811
    dtype, device = path
    order(f"backwards {device}")
    drawn = tests.draw(masks, 301)
    tests.check(tfla, cell, 301, 12.0, dtype, backend="cpu", chunk_size=128, **drawn)
