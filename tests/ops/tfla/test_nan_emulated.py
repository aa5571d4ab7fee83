"""Runs ops/tfla/test_nan.py without a GPU: tests/emulator runs tfla's CUDA kernels."""

import pytest
import torch

from mlstm_cases import CELLS
from ops.tfla import test_nan as nan_tests
from ops.tfla.test_emulated import (  # noqa: F401  (fixtures)
    no_float64,
    order,
    pytestmark,
    tfla,
)
from ops.tfla.test_gates_emulated import PATHS


@pytest.mark.parametrize("path", [*PATHS, (torch.float16, "")], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_h_of_a_held_step_is_0_whatever_the_others_hold(tfla, order, cell, path):  # noqa: F811
    dtype, device = path
    order(device)
    nan_tests.test_h_of_a_held_step_is_0_whatever_the_others_hold(tfla, cell, dtype)


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_gate_that_is_nan_spoils_the_state(tfla, cell, gate):  # noqa: F811
    nan_tests.test_a_gate_that_is_nan_spoils_the_state(tfla, cell, gate)


@pytest.mark.parametrize("t", [0, 80, 200])
def test_a_gate_that_is_nan_is_in_m_until_a_reset(tfla, t):  # noqa: F811
    nan_tests.test_a_gate_that_is_nan_is_in_m_until_a_reset(tfla, t)


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_gate_that_is_nan_does_not_pass_a_reset(tfla, cell, gate):  # noqa: F811
    nan_tests.test_a_gate_that_is_nan_does_not_pass_a_reset(tfla, cell, gate, "cpu")


def test_an_input_gate_that_shuts_for_good(tfla):  # noqa: F811
    nan_tests.test_an_input_gate_that_shuts_for_good(tfla, "cpu")


def test_an_n_that_is_nan_spoils_h(tfla):  # noqa: F811
    nan_tests.test_an_n_that_is_nan_spoils_h(tfla)
