"""Tests that a held step's values never matter in tfla; see held_steps.py."""

import pytest
import torch

from held_steps import BACKENDS, DTYPES, B, T, check, held


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", [("exp", None), ("sigmoid", None), ("sigmoid", "floor")], ids=str)
def test_mlstm(tfla, cell, dtype, backend):
    gate, normalize = cell
    hold, reset = held(), torch.rand(B, T) < 0.1
    rows = [torch.randn(B, T, 2, 16).to(dtype) for _ in range(3)]
    gates = [torch.randn(B, T, 2) for _ in range(2)]
    state = [torch.randn(B, 2, 16, 16)] + [torch.randn(B, 2, 16)] * (
        gate == "exp" or bool(normalize)
    )
    m = [torch.randn(B, 2)] * (gate == "exp")
    options = {"input_gate": gate, "normalize": normalize, "chunk_size": 16, "backend": backend}
    run = lambda q, k, v, i, f, *state: tfla.mlstm(
        q, k, v, i, f, (*state, *m), hold=hold, reset=reset, **options
    )
    check(run, [*rows, *gates, *state], 5, hold)


@pytest.mark.parametrize("value", [1e10, 3e38])
def test_large_values_of_held_steps_do_not_matter(tfla, value):
    q, k, v = torch.randn(3, 1, 4, 1, 8)
    i, f = torch.randn(2, 1, 4, 1)
    hold = torch.tensor([[False, True, False, False]])
    found = []
    for number in (0.0, value):
        leaves = [t.masked_fill(hold[..., None, None], number).requires_grad_() for t in (q, k, v)]
        h, _ = tfla.mlstm(*leaves, i, f, hold=hold)
        found.append((h, *torch.autograd.grad(h.sum(), leaves)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
