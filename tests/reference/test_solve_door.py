"""Tests that solve refuses bad arguments by name, and that its example runs."""

import doctest
import sys

import pytest
import torch

from flashcell.kernels import diagonal_rnn as kernel

D = 4


def cell(h, x, w):
    z = torch.sigmoid(w[0] * h + x[:, 0])
    return z * h + (1 - z) * torch.tanh(w[1] * h + x[:, 1])


WRONG = {
    "x": ({"x": [1.0]}, TypeError, "x is a list, but must be a tensor"),
    "x's rank": ({"x": torch.zeros(3)}, ValueError, "x has shape .3., but must be .B, T, ...."),
    "a second x": (
        {"x": (torch.zeros(2, 3, 2, D), torch.zeros(2, 4))},
        ValueError,
        r"x\[1\] has shape .2, 4.",
    ),
    "no state": ({"h0": None}, ValueError, "h0 and state_shape are both None"),
    "h0": ({"h0": torch.zeros(3, D)}, ValueError, "h0 has shape .3, 4., but must be .B, .S."),
    "state_shape": ({"state_shape": (5,)}, ValueError, "h0 has shape .2, 4., but must be .B, .S."),
    "empty state_shape": (
        {"h0": None, "state_shape": ()},
        ValueError,
        r"state_shape is \(\), but must be a tuple of ints, not empty",
    ),
    "state_shape a number": (
        {"h0": None, "state_shape": D},
        ValueError,
        "state_shape is 4, but must be a tuple of ints",
    ),
    "params": ({"params": torch.ones(2, D)}, TypeError, "params is a Tensor, but must be a tuple"),
    "a view too large": (
        {"params": (torch.ones(1).expand(2**62),)},
        ValueError,
        r"params\[0\] has shape .4611686018427387904., but must have sizes below",
    ),
    "cell": ({"cell": 3}, TypeError, "cell is a int, but must be a function or an nn.Module"),
    "bounds": ({"bounds": 1.0}, ValueError, r"bounds is 1.0, but must be None or \(low, high\)"),
    "one bound": ({"bounds": (1.0,)}, ValueError, r"must be None or \(low, high\)"),
    "bounds turned round": ({"bounds": (1, -1)}, ValueError, "bounds has a low above its high"),
    "structure": (
        {"structure": "band"},
        ValueError,
        "structure is 'band', but must be one of auto",
    ),
    "mode": ({"mode": "cuda"}, ValueError, "mode is 'cuda', but must be one of auto, scan"),
    "fused": ({"mode": "fused"}, ValueError, "only flash_gru and flash_lstm are"),
    "scan": ({"mode": "scan"}, RuntimeError, "backend 'cpu' was asked for, but this copy"),
    "tol": ({"tol": -1.0}, ValueError, "tol is -1.0, but must be None or a number >= 0"),
    "max_iters": ({"max_iters": 1.5}, ValueError, "max_iters is 1.5, but must be an int >= 0"),
    "tol text": ({"tol": "0"}, TypeError, "tol is a str, but must be None or a number"),
    "chunk None": ({"chunk": None}, ValueError, "chunk is None, but must be an int >= 1"),
    "chunk": ({"chunk": 0}, ValueError, "chunk is 0, but must be an int >= 1"),
    "guess": ({"guess": torch.zeros(2, D)}, ValueError, "guess has shape .2, 4., but must be"),
    "shape": (
        {"cell": lambda h, x, w: h[:, :1]},
        ValueError,
        r"cell\(...\) has shape .6, 1., but must be",
    ),
    "dtype": (
        {"cell": lambda h, x, w: h.double()},
        TypeError,
        r"cell\(...\) has dtype torch.float64",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(what):
    changed, error, message = WRONG[what]
    call = {"cell": cell, "x": torch.zeros(2, 3, 2, D), "h0": torch.zeros(2, D)}
    with pytest.raises(error, match=message):
        kernel.solve(**{**call, "params": (torch.ones(2, D),), **changed})
    with pytest.raises(TypeError, match="an option is 'modus', but must be one of"):
        kernel.ParallelRNN(cell, (D,), modus="scan")
    with pytest.raises(ValueError, match="state_shape is 4, but must be a tuple of ints"):
        kernel.ParallelRNN(cell, D)


def test_a_parameter_may_be_a_number():
    scaled = lambda h, x, w, gain: cell(h, x, gain * w)
    x, w = torch.randn(2, 3, 2, D), torch.randn(2, D)
    got = kernel.solve(scaled, x, torch.zeros(2, D), params=(w, 0.5))
    want = kernel.solve(cell, x, torch.zeros(2, D), params=(0.5 * w,))
    for a, b in zip(got[:2], want[:2], strict=True):
        assert torch.equal(a, b)


def test_the_documented_example():
    module = sys.modules[kernel.solve.__module__]
    failed, tried = doctest.testmod(module)
    assert tried == 5
    assert failed == 0
