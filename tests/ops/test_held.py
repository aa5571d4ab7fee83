"""Tests that a held step's values never matter: NaN in its inputs and in the gradient of its h
changes no bit of the outputs, the states and the gradients, which are 0 there."""

import pytest
import torch

from held_steps import BACKENDS, DTYPES, B, T, check, held


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu", "slstm"])
@pytest.mark.parametrize("D", [8, 96])
def test_fused(fused_rnn, cell, D, dtype, backend):
    spec, hold, reset = fused_rnn.CELLS[cell], held(), torch.rand(B, T) < 0.1
    x, bias = torch.randn(B, T, spec.gates, 2, D), torch.randn(spec.bias_rows, 2, D)
    weight = torch.randn(spec.gates, 2, D, D) / D
    state = [torch.rand(B, 2, D) for _ in range(spec.states)]
    run = lambda x, weight, bias, *state: fused_rnn.recurrent(
        cell, x, weight, bias, state, hold=hold, reset=reset, backend=backend
    )
    check(run, [x.to(dtype), weight.to(dtype), bias.to(dtype), *state], 1, hold)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["sequential", "multiple_shooting", "newton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["flash_gru", "flash_lstm"])
def test_diagonal(diagonal_rnn, cell, dtype, method, backend):
    if method != "sequential" and backend == "cpu":
        pytest.skip("the CPU has only the sequential method")
    spec, hold, reset = diagonal_rnn.CELLS[cell], held(), torch.rand(B, T) < 0.1
    rows = [torch.randn(n, 16) for n in (3, spec.weights - 3, 3) if n]
    state = [torch.randn(B, 16) for _ in range(spec.states)]

    def run(x, *rest):
        *weights, bias = rest[: len(rows)]
        options = {"hold": hold, "reset": reset, "method": method, "backend": backend}
        return getattr(diagonal_rnn, cell)(x, *weights, rest[len(rows) :], bias=bias, **options)

    check(run, [torch.randn(B, T, 3, 16).to(dtype), *rows, *state], 1, hold)
