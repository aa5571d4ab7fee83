"""Tests gradients of the stand-ins for torch.nn's layers with an output gradient in any order in memory."""

from itertools import permutations

import pytest
import torch

from cases import DEVICE
from numerics import assert_close
from torch_twins import SEQUENCES, make_twins

I, D = 5, 6
FORMS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "projected": {"proj_size": 3},
}
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float32
EPS = 1e-12 if DEVICE == "cpu" else 5e-3


def in_order(order, *sizes):
    """Returns random values whose dimension order[0] is outermost in memory, and order[-1] innermost."""
    values = torch.randn(*(sizes[dim] for dim in order), dtype=DTYPE)
    return values.permute([order.index(dim) for dim in range(len(order))])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_output_gradients(kind, form, batch_first):
    options = {**FORMS[form], "batch_first": batch_first, "dtype": DTYPE}
    if form == "projected" and kind != "LSTM":
        pytest.skip("projections are of LSTMs alone")
    theirs, ours = make_twins(kind, I, D, backend=DEVICE, **options)
    for B, T in ((3, 4), (1, 5), (4, 1)):
        sizes = (B, T) if batch_first else (T, B)
        for order in permutations(range(3)):
            x = in_order(order, *sizes, I).requires_grad_()
            dy = in_order(order, *sizes, ours(x)[0].shape[-1])
            found, wanted = (
                torch.autograd.grad(m(x)[0], (x, *m.parameters()), dy) for m in (ours, theirs)
            )
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                assert_close(f"gradient {number} of {order}, B {B}, T {T}", one, other, EPS)
