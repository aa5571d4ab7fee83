"""What a call must not lose on its way to the op: a NaN, a bias's digits, the precision asked for."""

import pytest
import torch

from cases import DEVICE, Case, make
from flashcell.kernels.fused_rnn import CELLS
from numerics import assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.mark.parametrize("backend", [DEVICE, "reference"])
def test_a_nan_in_x_is_seen(fused_rnn, name, backend):
    """A NaN in x shows from its step on, in its sequence alone, also after a relu."""
    call = make(CELLS[name], Case(3, 5, 1, 8, ("state",)), torch.float32)
    clean, _ = fused_rnn.recurrent(name, **call, backend=backend)
    call["x"][1, 2, :, 0, 3] = float("nan")
    h, last = fused_rnn.recurrent(name, **call, backend=backend)
    assert h[1, 2, 0, 3].isnan()
    assert h[1, 3:].isnan().all()
    assert last[0][1].isnan().all()
    assert_bitwise("the others' h", h[[0, 2]], clean[[0, 2]])
    assert_bitwise("h before", h[1, :2], clean[1, :2])


@pytest.mark.parametrize("backend", [DEVICE, "reference"])
def test_a_bias_in_fp32_is_not_rounded_to_bf16(fused_rnn, backend):
    """The bias is all there is: h' = relu(bias), and the state is in fp32."""
    x, weight = torch.zeros(2, 1, 1, 1, 8).bfloat16(), torch.zeros(1, 1, 8, 8).bfloat16()
    bias = 1 + torch.arange(1, 9).view(1, 1, 8) * 2.0**-12  # in bf16 all of them are 1
    _, (state,) = fused_rnn.rnn(x, weight, bias, nonlinearity="relu", backend=backend)
    assert_bitwise("state", state, bias.expand_as(state))


@pytest.mark.parametrize("backend", [DEVICE, "reference"])
def test_h_is_rounded_to_the_nearest_even(fused_rnn, backend):
    """h is rounded as torch rounds it; the sums lie halfway between two numbers of bf16."""
    bias = (1 + torch.arange(1, 32, 2) * 2.0**-8).view(1, 1, 16)
    x, weight = torch.zeros(1, 1, 1, 1, 16).bfloat16(), torch.zeros(1, 1, 16, 16).bfloat16()
    h, (state,) = fused_rnn.rnn(x, weight, bias, nonlinearity="relu", backend=backend)
    assert_bitwise("state", state[0, 0], bias[0, 0])
    assert_bitwise("h", h[0, 0, 0], bias[0, 0].bfloat16())


@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("tf32", True)])
def test_the_op_is_told_the_precision(fused_rnn, monkeypatch, name, precision, tf32):
    calls, op = [], f"{name}_fwd"
    run = fused_rnn.formulas.CALLS[op]

    def spy(*arguments):
        calls.append(arguments[-2])
        return run(*arguments)

    monkeypatch.setitem(fused_rnn.formulas.CALLS, op, spy)
    fused_rnn.recurrent(name, **make(CELLS[name], Case(2, 3, 1, 8), torch.float32),
                        precision=precision)  # fmt: skip
    assert calls == [tf32]
