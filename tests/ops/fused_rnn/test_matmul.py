"""Tests tf32_matmul: products of any layout are as exact as TF32 is."""

import pytest
import torch

from cases import DEVICE
from numerics import assert_close

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"
)
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every second": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize(
    "shape", [(1, 33, 100, 72), (3, 8, 5, 7), (1, 1, 1, 1), (2, 1, 64, 9)], ids=str
)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_every_layout(fused_rnn, shape, left, right):
    N, M, K, P = shape
    a = LAYOUTS[left](torch.randn(N, M, K)).requires_grad_()
    b = LAYOUTS[right](torch.randn(N, K, P)).requires_grad_()
    matmul, dc = fused_rnn.autograd.CALLS["tf32_matmul"], torch.randn(N, M, P)
    c = matmul(a, b)
    exact = (a.double() @ b.double()).detach()
    assert_close("c", c.double(), exact, 2e-3)
    da, db = torch.autograd.grad(c, (a, b), dc)
    assert_close("da", da.double(), dc.double() @ b.double().mT, 2e-3)
    assert_close("db", db.double(), a.double().mT @ dc.double(), 2e-3)


def test_wrong_arguments(fused_rnn):
    op, a = fused_rnn.dispatch.ops.tf32_matmul, torch.randn(2, 3, 4)
    for wrong, name in ((a[0], "b"), (a, "b"), (a.half(), "b"), (a.mT[:1], "b")):
        with pytest.raises(RuntimeError, match=name):
            op(a, wrong)


def test_large_projections_of_modules_are_in_tf32(fused_rnn, monkeypatch):
    """The switch of cuDNN's recurrent networks decides, not the one of matrix products."""
    calls, matmul = [], fused_rnn.autograd.CALLS["tf32_matmul"]
    spy = lambda *arguments: calls.append(1) or matmul(*arguments)
    monkeypatch.setitem(fused_rnn.autograd.CALLS, "tf32_matmul", spy)
    x, w = torch.randn(5000, 400), torch.randn(400, 400)
    exact = x.double() @ w.double().mT
    rough = fused_rnn.linear(x, w, precision="tf32")
    assert calls
    assert 1e-5 < ((rough - exact).norm() / exact.norm()).item() < 2e-3
    calls.clear()
    fine = fused_rnn.linear(x, w)
    assert not calls
    assert ((fine - exact).norm() / exact.norm()).item() < 1e-5
