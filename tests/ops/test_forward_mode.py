"""Tests derivatives in forward mode: no kernel has them, and none drops a tangent silently."""

import pytest
import torch
from torch.autograd import forward_ad

from cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")


def lstm(kernel, x):
    return kernel.lstm(x.view(2, 3, 4, 1, 4), torch.ones(4, 1, 4, 4))


def lstm_step(kernel, x):
    return kernel.lstm_step(x.view(6, 4, 1, 4), torch.ones(4, 1, 4, 4))


def linear(kernel, x):
    return kernel.linear(x.view(6, 16), torch.ones(3, 16))


def flash_gru(kernel, x):
    return kernel.flash_gru(x.view(4, 2, 3, 4), torch.ones(3, 4))


def linear_scan(kernel, x):
    x = x.view(2, 6, 8)
    return kernel.linear_scan(x, x)


def conv_step(kernel, x):
    return kernel.conv_step(x.view(12, 8), torch.ones(8, 4), None, torch.zeros(12, 3, 8))


def mlstm(kernel, x):
    x = x.view(2, 3, 2, 8)
    return kernel.mlstm(x, x, x, x[..., 0], x[..., 0])


def mlstm_step(kernel, x):
    x = x.view(6, 2, 8)
    return kernel.mlstm_step(x, x, x, x[..., 0], x[..., 0])


def linear_step(kernel, x):
    return kernel.linear_step(x.view(6, 16), [torch.ones(3, 16)])


CALLS = {
    "fused_rnn": [lstm, lstm_step, linear],
    "diagonal_rnn": [flash_gru, linear_scan, conv_step],
    "tfla": [mlstm, mlstm_step, linear_step],
}


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    ("name", "call"), [pytest.param(k, c, id=c.__name__) for k, cs in CALLS.items() for c in cs]
)
def test_a_tangent_is_refused(request, name, call, recorded):
    """Kernels refuse forward-mode tangents, also if no weight needs a gradient; the same calls
    without tangents work."""
    kernel, x = request.getfixturevalue(name), torch.randn(96)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        call(kernel, x)
        with pytest.raises((NotImplementedError, ValueError), match=r"forward mode|has a tangent"):
            call(kernel, forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises((NotImplementedError, ValueError), match=r"forward mode|has a tangent"):
        torch.func.jvp(lambda x: call(kernel, x)[0], (x,), (torch.ones_like(x),))
