"""Tests that the plot of transfer behaviour shows flashcell's cells."""

import pytest
import torch

from commands import load_command
from flashcell.kernels import tfla
from numerics import assert_close


@pytest.fixture(scope="module")
def script():
    return load_command("plot_transfer")


@pytest.mark.parametrize(
    ("gate", "normalize", "divisor"),
    [
        ("exp", None, "max(|n q|, e^-m)"),
        ("sigmoid", None, "1"),
        ("sigmoid", "floor", "max(|n q|, 1)"),
    ],
)
def test_outputs_are_the_cells(script, gate, normalize, divisor):
    q, k, v = script.draw()
    for i, f in ((-10.0, 3.0), (2.0, -1.0), (0.0, 8.0)):
        of_f = script.kept(torch.tensor(f, dtype=torch.float64), q, k, v)
        h = script.outputs(gate, divisor, torch.tensor(i, dtype=torch.float64), of_f)
        row = [t[None, :, None] for t in (q, k, v)]
        gates = [torch.full_like(row[0][..., 0], g) for g in (i, f)]
        want, _ = tfla.mlstm(*row, *gates, input_gate=gate, normalize=normalize)
        assert_close(f"{gate} {divisor} i {i} f {f}", h, want[0, :, 0], 1e-13)
