"""tfla's kernels of narrow heads over several chunks, run by tests/emulator."""

import pytest
import torch

from mlstm_cases import Case
from ops.tfla.test_emulated import (  # noqa: F401  (fixtures)
    cell,
    check_case,
    no_float64,
    order,
    pytestmark,
    tfla,
)

CASES = [
    Case(1, 1100, 1, 64, 64, ("state",), 64, f=6.0),
    Case(1, 1100, 2, 32, 24, ("state", "reset"), 64),
    Case(2, 150, 9, 16, 32, ("state", "lengths", "hold"), 64),
    Case(5, 90, 3, 40, 64, ("state", "cu"), 64),
    Case(1, 200, 2, 32, 32, ("state",), 64, f=-2.0),
]


slow = lambda device: pytest.param(device, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "device", ["processors=132", slow("processors=1"), slow("arch=80 shared=99")]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_exact_as_the_reference(tfla, order, cell, case, device):  # noqa: F811
    """Several chunks in one thread block; on many processors, a sequence in segments; and where the
    shared memory does not hold what heads of more than 32 need."""
    check_case(tfla, order, cell, case, torch.bfloat16, device=device)
