"""tfla's backward kernels where nothing follows the last chunk, run by tests/emulator."""

import pytest
import torch

from cases import upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import Case, leaves, make, normal
from numerics import assert_bitwise, assert_close
from ops.tfla.test_emulated import (  # noqa: F401  (fixtures)
    ORDERS,
    no_float64,
    order,
    pytestmark,
    tfla,
)


@pytest.mark.parametrize("steps", [40, 100])
@pytest.mark.parametrize("cell", ["exp", "sigmoid"])
def test_the_gradient_of_h_alone(tfla, order, cell, steps):  # noqa: F811
    """No gradient of the last state: of the last chunk's two outputs, the second is not waited for."""
    call = make(cell, Case(2, steps, 1, 136, 40, ("state",), 64), torch.float32)
    dh = normal(call["v"].shape)

    def gradients(kernel, call, **options):
        call, sources = leaves(call)
        h, _ = kernel.mlstm(**call, **options)
        found = torch.autograd.grad(h, list(sources.values()), dh.to(h.dtype))
        return dict(zip(sources, found, strict=True))

    exact = gradients(reference, upcast(call))
    results = []
    for words in ORDERS:
        order(words)
        results.append(gradients(tfla, call, backend="cpu"))
    for key in exact:
        for words, other in zip(ORDERS[1:], results[1:], strict=True):
            assert_bitwise(f"d{key}, {words}", other[key], results[0][key])
        assert_close(f"d{key}", results[0][key].double(), exact[key], 4e-5)
