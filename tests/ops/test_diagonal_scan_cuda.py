"""diagonal-rnn's scans on CUDA where plan.h takes other kernels than for the shapes of test_diagonal_scan."""

import pytest
import torch
from test_diagonal_scan import draw

from cases import DEVICE
from numerics import assert_bitwise, assert_close

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]
short = lambda dtype: str(dtype)[6:]


def by_doubling(a, b, h0):
    """linear_scan in float64 in log2(T) steps."""
    a, b = a.double(), b.double()
    b[:, 0] += a[:, 0] * h0.double()
    span = 1
    while span < a.shape[1]:
        b[:, span:] = torch.addcmul(b[:, span:], a[:, span:], b[:, :-span])
        a[:, span:] = a[:, span:] * a[:, :-span]
        span *= 2
    return b


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("D", [1032, 520])
def test_long_scan(diagonal_rnn, D, reverse, dtype):
    """Enough steps for the clusters that plan.h keeps for them; a part of a tile and of a column."""
    a, b, h0 = draw((1, 2**26 // D + 37, D), None, dtype)
    h = diagonal_rnn.linear_scan(a, b, h0, reverse=reverse)
    ahead = lambda t: t[..., ::21].flip(1) if reverse else t[..., ::21]
    exact = by_doubling(ahead(a), ahead(b), h0[:, ::21])
    assert_close("h", ahead(h).double(), exact, {torch.float32: 2e-7, torch.bfloat16: 3e-3}[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scans_that_overlap_wait_for_each_other(diagonal_rnn, dtype):
    """A scan by clusters starts while the one ahead of it ends: its input, and memory used again."""
    scan = diagonal_rnn.linear_scan
    a, b, h0 = draw((1, 700, 512), None, dtype)
    a, results = 0.3 * a, []
    for wait in (True, False):
        h = b
        for _ in range(60):
            h = 0.2 * scan(a, scan(a, scan(a, h, h0), h0, reverse=True)) + 0.2 * scan(a, h, h0)
            if wait:
                torch.cuda.synchronize()
        results.append(h)
    assert results[0].isfinite().all()
    assert_bitwise("h", results[1], results[0])
