"""Tests flashcell.flashrnn against torch.nn's modules, which have the same cells in other layouts."""

import itertools

import pytest
import torch
from torch import nn

import flashcell
from flashcell.integrations.flashrnn import CELLS, LAYOUTS, FlashRNNConfig, flashrnn

B, T, N, D = 3, 7, 2, 8
WIDTH = N * D


def draw(function, dtype=torch.float32):
    """Returns Wx, R, b and states in flashrnn's layouts."""
    gates, bias, kept = {"lstm": (4, 4, 2), "gru": (3, 4, 1), "elman": (1, 1, 1)}.get(
        function, (4, 4, 4)
    )
    given = [(B, T, gates, N, D), (gates, N, D, D), (bias, N, D), (kept, B, 1, N, D)]
    Wx, R, b, states = (torch.randn(shape, dtype=torch.float64) for shape in given)
    return [t.to(dtype).requires_grad_() for t in (Wx, 0.3 * R, b, states.abs() + 1.0)]


def by_heads(function, Wx, R, b, states):
    """Runs torch.nn's module once for each head, whose weights are all that it has."""
    kind = {"lstm": nn.LSTM, "gru": nn.GRU, "elman": nn.RNN}[function]
    order = [1, 2, 0] if function == "gru" else list(range(len(R)))
    outputs, lasts = [], []
    for n in range(N):
        module = kind(len(R) * D, D, batch_first=True).double()
        weight_ih = torch.eye(len(R) * D, dtype=torch.float64)
        bias_hh = torch.zeros(len(R), D, dtype=torch.float64)
        bias_ih = b[:, n]
        if function == "gru":
            bias_hh[2], bias_ih = b[0, n].detach(), b[1:, n]
        parameters = {
            "weight_ih_l0": weight_ih,
            "weight_hh_l0": R[order, n].reshape(-1, D),
            "bias_ih_l0": bias_ih.reshape(-1),
            "bias_hh_l0": bias_hh.reshape(-1),
        }
        hx = tuple(s.contiguous() for s in states[:, :, :, n].transpose(1, 2))
        x = Wx[:, :, :, n].reshape(B, T, -1)
        hx = hx if function == "lstm" else hx[0]
        y, last = torch.func.functional_call(module, parameters, (x, hx))
        outputs.append(y)
        lasts.append(torch.stack(last if function == "lstm" else (last,)))
    return torch.stack(outputs, 2), torch.stack(lasts, 3).transpose(1, 2)


@pytest.mark.parametrize("function", ["lstm", "gru", "elman"])
def test_it_is_torchs(function):
    given = draw(function, torch.float64)
    steps, last = flashrnn(*given, function=function, backend="vanilla")
    h, ends = by_heads(function, *given)
    assert steps.shape == (len(given[3]), B, T, N, D)
    assert last.shape == (len(given[3]), B, 1, N, D)
    torch.testing.assert_close(steps[0], h)
    torch.testing.assert_close(last, ends)
    torch.testing.assert_close(steps[:, :, -1:], last)
    dh = torch.randn_like(h)
    sources = [given[0], given[1], given[3]]
    got = torch.autograd.grad((steps[0] * dh).sum(), sources)
    torch.testing.assert_close(got, torch.autograd.grad((h * dh).sum(), sources))


@pytest.mark.parametrize("function", CELLS)
def test_every_layout(function):
    Wx, R, b, states = (t.detach() for t in draw(function))
    want = flashrnn(Wx, R, b, states, function=function, backend="vanilla")
    to = lambda x, given, wanted: x.permute([given.index(letter) for letter in wanted])
    for shapes in itertools.product(*LAYOUTS.values()):
        config = FlashRNNConfig(
            "vanilla", function, **dict(zip(LAYOUTS, shapes, strict=True)), hidden_dim=WIDTH
        )
        own = ("BTGHD", "GHDP", "GHD", "SBTHD")
        given = [to(x, a, z) for x, a, z in zip((Wx, R, b, states), own, shapes, strict=True)]
        got = flashcell.flashrnn(*given, config=config)
        torch.testing.assert_close([to(y, shapes[3], "SBTHD") for y in got], list(want))


def test_states_and_options():
    Wx, R, b, states = draw("slstm")
    steps, _ = flashrnn(Wx, R, b, function="slstm", dtype="float32")
    zeros = torch.zeros_like(states)
    torch.testing.assert_close(steps, flashrnn(Wx, R, b, zeros, "slstm", dtype="float32")[0])
    config = FlashRNNConfig(function="slstm", dtype="bfloat16")
    assert flashrnn(Wx, R, b, config=config)[0].dtype == torch.bfloat16
    config.enable_automatic_mixed_precision = False
    assert flashrnn(Wx, R, b, config=config)[0].dtype == torch.float32
    config.gradient_recurrent_cut = True
    (cut,) = torch.autograd.grad(flashrnn(Wx, R, b, config=config)[0][0].sum(), R)
    config.gradient_recurrent_cut, config.gradient_recurrent_clipval = False, 0.0
    (clipped,) = torch.autograd.grad(flashrnn(Wx, R, b, config=config)[0][0].sum(), R)
    torch.testing.assert_close(cut, clipped)
    assert not torch.equal(cut, torch.autograd.grad(steps[0].sum(), R)[0])


def test_wrong_arguments_are_named():
    Wx, R, b, _ = draw("lstm")
    for change, error, text in (
        ({"function": "gruu"}, ValueError, "function is 'gruu', but must be one of lstm, gru"),
        ({"backend": "cpu"}, ValueError, "backend is 'cpu', but must be one of vanilla"),
        ({"Wx": Wx[0]}, ValueError, r"Wx has shape \[7, 4, 2, 8\], but must be BTGHD"),
        ({"R": None}, TypeError, "R is a NoneType, but must be a tensor"),
        ({"R": R[:3]}, ValueError, "weight has shape"),
        ({"config": FlashRNNConfig(forward_clipval=1.0)}, ValueError, "forward_clipval is 1.0"),
        ({"config": FlashRNNConfig(dtype="float64")}, ValueError, "dtype is 'float64'"),
        ({"config": FlashRNNConfig(input_shape="GBTHD")}, ValueError, "input_shape is 'GBTHD'"),
    ):
        with pytest.raises(error, match=text):
            flashrnn(**({"Wx": Wx, "R": R, "b": b} | change))
