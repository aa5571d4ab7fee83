"""tfla: bf16 at the widths of a model, over gate biases and chunk sizes, against float64."""

import pytest
import torch
from test_tfla import run

from cases import upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import Case, make, normal
from numerics import assert_close

# Relative to float64. The exponential gate's gradients can be one row whose divisor nearly cancels,
# which bf16 operands move more: worst seen dq 6e-3, dk 6.2e-3, di 5.6e-3, dv 3.1e-3; else 3e-3, df 4.3e-3.
BOUNDS = {
    "exp": {"h": 4e-3, "dq": 8e-3, "dk": 8e-3, "dv": 4e-3, "di": 8e-3, "df": 1e-2},
    "sigmoid": {"h": 3e-3, "dq": 3e-3, "dk": 3e-3, "dv": 3e-3, "di": 4e-3, "df": 1e-2},
}


@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize(("i", "f"), [(-10.0, 3.0), (0.0, 3.0), (0.0, 12.0), (10.0, 6.0)])
@pytest.mark.parametrize("cell", ["exp", "sigmoid"])
def test_bf16_at_a_models_width(tfla, cell, i, f, size):
    call = make(cell, Case(1, 512, 1, 128, 256, (), size, i, f), torch.bfloat16)
    given = [normal(call["v"].shape, torch.bfloat16), torch.zeros(1, 1, 128, 256)]
    given += [torch.zeros(1, 1, 128)] * (cell == "exp")
    got, exact = run(tfla, call, given), run(reference, upcast(call), given)
    for key, bound in BOUNDS[cell].items():
        assert_close(key, got[key].double(), exact[key], bound)
