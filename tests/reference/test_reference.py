"""Tests fused-rnn's torch reference against torch.nn and float64 gradcheck."""

import pytest
import torch

from cases import Case, make
from flashcell.kernels import fused_rnn as reference
from flashcell.kernels.fused_rnn.stack import add
from numerics import assert_close

CELLS = reference.CELLS
TORCH = {  # our cell -> torch's module, and its bias from (b_ih, b_hh)
    "lstm": (torch.nn.LSTM, {}),
    "gru": (torch.nn.GRU, {}),
    "rnn_tanh": (torch.nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (torch.nn.RNN, {"nonlinearity": "relu"}),
}


def our_bias(cell, module):
    G = cell.gates
    b_ih, b_hh = module.bias_ih_l0.view(G, 1, -1), module.bias_hh_l0.view(G, 1, -1)
    if cell.name == "gru":  # r and z have one bias; n keeps both
        return torch.cat([add(b_ih[:2], b_hh[:2]), b_ih[2:], b_hh[2:]])
    return add(b_ih, b_hh)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("T", [1, 9])
def test_equals_torch_nn(name, T):
    """Outputs, last states and every gradient equal those of torch's own module, in float64."""
    cell, (cls, options) = CELLS[name], TORCH[name]
    B, D = 3, 10
    module = cls(7, D, batch_first=True, **options).double()
    inputs = torch.randn(B, T, 7, dtype=torch.float64, requires_grad=True)
    state = [torch.randn(B, D, dtype=torch.float64, requires_grad=True) for _ in range(cell.states)]
    packed = [s[None] for s in state]
    want, last = module(inputs, tuple(packed) if len(packed) > 1 else packed[0])
    last = last if isinstance(last, tuple) else (last,)

    x = torch.nn.functional.linear(inputs, module.weight_ih_l0).view(B, T, cell.gates, 1, D)
    weight = module.weight_hh_l0.view(cell.gates, 1, D, D)
    h, ours = reference.recurrent(
        name, x, weight, our_bias(cell, module), tuple(s[:, None] for s in state)
    )
    assert_close("h", h.view(B, T, D), want, 1e-15)
    for k in range(cell.states):
        assert_close(f"state[{k}]", ours[k].view(B, D), last[k][0], 2e-15)

    sources = [inputs, *state, *module.parameters()]
    dh, dlast = torch.randn_like(want), [torch.randn_like(s) for s in last]
    expected = torch.autograd.grad([want, *last], sources, [dh, *dlast])
    got = torch.autograd.grad(
        [h, *ours],
        sources,
        [dh.view_as(h), *(d.view_as(o) for d, o in zip(dlast, ours, strict=True))],
    )
    for source, g, e in zip(range(len(sources)), got, expected, strict=True):
        assert_close(f"gradient {source}", g, e, 3e-15)


OPTIONS = [("state", "reset", "hold"), ("state", "lengths"), ("state", "cu"), ()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("name", CELLS)
def test_gradcheck(name, options):
    """Analytic gradients of x, weight, bias and states against finite differences."""
    cell = CELLS[name]
    call = make(cell, Case(2, 4, 2, 2, options), torch.float64)
    sources = ["x", "weight", "bias"]
    tensors = [call[k].requires_grad_() for k in sources]
    carried = cell.states - cell.detached_states
    state = call.get("state", ())
    if name == "slstm" and state:  # the cell is not continuous at n = 0
        state = (*state[:2], state[2].clamp(min=0.5), state[3])
    tensors += [s.requires_grad_() for s in state[:carried]]

    def outputs(*values):
        given = dict(zip(sources, values, strict=False))
        if state:
            given["state"] = (*values[3:], *state[carried:])
        h, last = reference.recurrent(name, **{**call, **given})
        if (
            name == "slstm"
        ):  # c e^m and n e^m do not depend on the choice of m; gradients hold m fixed
            scale = last[3].exp()
            last = (last[0], last[1] * scale, last[2] * scale)
        return (h, *last)

    assert torch.autograd.gradcheck(outputs, tensors)


def test_slstm_does_not_depend_on_the_stabiliser():
    cell = CELLS["slstm"]
    call = make(cell, Case(2, 6, 1, 4, ("state",)), torch.float64)
    h, _ = reference.slstm(**call)
    hidden, c, n, m = call["state"]
    call["state"] = (hidden, c * torch.e, n * torch.e, m - 1)
    assert_close("h", reference.slstm(**call)[0], h, 1e-15)


@pytest.mark.parametrize("row", ["all", "one"])
def test_slstm_empty_unit_with_a_closed_gate(row):
    """i = -110 from an empty state: n would underflow with m = 0 (FlashRNN eq. 12-15); ours is
    exact."""
    x = torch.full((2, 3, 4, 1, 2), -110.0)
    x[:, :, 2] = 0.5
    weight = torch.zeros(4, 1, 2, 2)
    reset = torch.zeros(2, 3, dtype=torch.bool)
    reset[:, 1] = torch.tensor([True, row == "all"])
    h, (_, c, n, _) = reference.slstm(x, weight, reset=reset)
    assert torch.isfinite(h).all()
    assert_close("c / n", c / n, torch.tanh(torch.full_like(c, 0.5)), 2.0**-23)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_grad_clip_is_elementwise_on_the_recurrent_term(clip):
    """One step back for Elman's cell, dh_0 = clip(R^T dr_1) exactly."""
    call = make(CELLS["rnn_tanh"], Case(2, 1, 1, 5, ("state",)), torch.float64)
    (h0,) = call["state"]
    h0.requires_grad_()
    h, _ = reference.recurrent("rnn_tanh", **call, grad_clip=clip)
    h.sum().backward()
    raw = torch.einsum("njk,bnj->bnk", call["weight"][0], (1 - h[:, 0] ** 2).detach())
    assert_close("dh0", h0.grad, raw.clamp(-clip, clip), 1e-15)


def test_autocast_does_not_reach_the_loop():
    """Its products, and their gradients, stay in the states' dtype."""
    call = make(reference.CELLS["lstm"], Case(2, 5, 2, 8, ("state",)), torch.float32)
    leaves = [call["x"].requires_grad_(), call["weight"].requires_grad_()]
    plain, _ = reference.lstm(**call)
    with torch.autocast("cpu", torch.bfloat16):
        h, _ = reference.lstm(**call)
    assert torch.equal(h, plain)
    for got, want in zip(
        torch.autograd.grad(h.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True
    ):
        assert torch.equal(got, want)
