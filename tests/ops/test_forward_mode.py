"""Tests derivatives in forward mode: the reference computes them where "auto" may choose it, and no
kernel drops a tangent silently."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad

from cases import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device"),
    pytest.mark.filterwarnings("ignore:the kernel has no derivatives in forward mode"),
]
ones = lambda like, *shape: torch.ones(*shape, dtype=like.dtype)


def lstm(kernel, x, **options):
    return kernel.lstm(x.view(2, 3, 4, 1, 4), ones(x, 4, 1, 4, 4), **options)


def lstm_step(kernel, x, **options):
    return kernel.lstm_step(x.view(6, 4, 1, 4), ones(x, 4, 1, 4, 4), **options)


def linear(kernel, x, **options):
    return kernel.linear(x.view(6, 16), ones(x, 3, 16), **options)


def flash_gru(kernel, x, **options):
    return kernel.flash_gru(x.view(4, 2, 3, 4), ones(x, 3, 4), **options)


def flash_lstm_step(kernel, x, **options):
    return kernel.flash_lstm_step(x.view(8, 3, 4), ones(x, 3, 4), ones(x, 2, 4), **options)


def linear_scan(kernel, x, **options):
    x = x.view(2, 6, 8)
    return kernel.linear_scan(x, x, **options)


def block_scan(kernel, x, **options):
    x = x.view(2, 6, 4, 2)
    return kernel.block_scan(x[..., None] * ones(x, 2), x, **options)


def conv_step(kernel, x):
    return kernel.conv_step(x.view(12, 8), torch.ones(8, 4), None, torch.zeros(12, 3, 8))


def mlstm(kernel, x, **options):
    x = x.view(2, 3, 2, 8)
    return kernel.mlstm(x, x, x, x[..., 0], x[..., 0], **options)


def mlstm_step(kernel, x, **options):
    x = x.view(6, 2, 8)
    return kernel.mlstm_step(x, x, x, x[..., 0], x[..., 0], **options)


def linear_step(kernel, x):
    return kernel.linear_step(x.view(6, 16), [torch.ones(3, 16)])


BY_REFERENCE = {
    "fused_rnn": [lstm, lstm_step, linear],
    "diagonal_rnn": [flash_gru, flash_lstm_step, linear_scan, block_scan],
    "tfla": [mlstm, mlstm_step],
}
REFUSED = {"diagonal_rnn": [conv_step], "tfla": [linear_step]}
each = lambda calls: [pytest.param(k, c, id=c.__name__) for k, cs in calls.items() for c in cs]


def first(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


@pytest.mark.parametrize(("name", "call"), each(BY_REFERENCE))
def test_tangents_are_the_references(request, name, call):
    kernel, x = request.getfixturevalue(name), torch.randn(96, dtype=torch.float64)
    function, v = lambda x: first(call(kernel, x)), torch.randn_like(x)
    h = 1e-5
    numeric = (function(x + h * v) - function(x - h * v)) / (2 * h)
    value, tangent = torch.func.jvp(function, (x,), (v,))
    torch.testing.assert_close(value, function(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-6)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), forward_ad.dual_level():
            dual = function(forward_ad.make_dual(x, v))
            assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)
    torch.testing.assert_close(torch.func.jacfwd(function)(x), torch.func.jacrev(function)(x))
    _, linear_map = torch.func.linearize(function, x)
    torch.testing.assert_close(linear_map(v), tangent)


@pytest.mark.parametrize(("name", "call"), each(BY_REFERENCE))
def test_it_warns_only_where_there_are_tangents(request, name, call):
    kernel, x = request.getfixturevalue(name), torch.randn(96)
    if call is not linear:  # torch's own takes its place
        with pytest.warns(RuntimeWarning, match="no derivatives in forward mode, so the reference"):
            torch.func.jvp(lambda x: first(call(kernel, x)), (x,), (x,))
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("error", RuntimeWarning)
        call(kernel, x)


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(("name", "call"), each(BY_REFERENCE))
def test_a_backend_asked_for_by_name_refuses(request, name, call, recorded):
    kernel, x = request.getfixturevalue(name), torch.randn(96)
    match = r"no derivatives in forward mode .* backend='reference'"
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        call(kernel, x, backend=DEVICE)
        with pytest.raises(NotImplementedError, match=match):
            call(kernel, forward_ad.make_dual(x, torch.ones_like(x)), backend=DEVICE)
    with pytest.raises(NotImplementedError, match=match):
        torch.func.jvp(lambda x: first(call(kernel, x, backend=DEVICE)), (x,), (x,))


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(("name", "call"), each(REFUSED))
def test_a_tangent_is_refused(request, name, call, recorded):
    """What has no reference that takes tangents refuses them, also if no weight needs a gradient."""
    kernel, x = request.getfixturevalue(name), torch.randn(96)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        call(kernel, x)
        with pytest.raises((NotImplementedError, ValueError), match=r"forward mode|has a tangent"):
            call(kernel, forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises((NotImplementedError, ValueError), match=r"forward mode|has a tangent"):
        torch.func.jvp(lambda x: call(kernel, x)[0], (x,), (torch.ones_like(x),))


def test_solve_runs_its_plain_loop(diagonal_rnn):
    cell = lambda h, x, w: torch.tanh(w * h + x)
    x, w = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    function = lambda x, w, **options: diagonal_rnn.solve(
        cell, x, params=(w,), state_shape=(3,), **options
    )[0]
    got = torch.func.jvp(function, (x, w), (x, w))
    want = torch.func.jvp(lambda x, w: function(x, w, mode="sequential"), (x, w), (x, w))
    torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match="mode is 'scan', but must be 'auto' or"):
        torch.func.jvp(lambda x: function(x, w, mode="scan"), (x,), (x,))
    a = torch.ones(3, 3, dtype=torch.float64)
    flash_gru = lambda x: diagonal_rnn.flash_gru(x, a, method="newton", backend="reference")[0]
    x = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="method is 'newton', but must be 'auto' or"):
        torch.func.jvp(flash_gru, (x,), (x,))
