"""The picture of the transfer behaviour is of our cells."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest
import torch

from flashcell.kernels import tfla
from numerics import assert_close

SCRIPT = Path(__file__).parents[2] / "scripts/plot_transfer"


@pytest.fixture(scope="module")
def script():
    loader = importlib.machinery.SourceFileLoader("plot_transfer", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


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
