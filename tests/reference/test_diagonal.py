"""Tests diagonal-rnn's reference: the equations written out again, and float64 gradcheck."""

import math

import pytest
import torch

from cases import Case
from diagonal_cases import leaves, make
from flashcell.kernels import diagonal_rnn as reference
from flashcell.kernels.diagonal_rnn.functional import select_method
from numerics import assert_close

CELLS = reference.CELLS
OPTIONS = [("state", "reset", "hold"), ("state", "lengths"), ("state", "cu"), ()]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def flash_gru(x, w, h):
    """Computes Danieli et al. (ParaRNN), eq. 7 with diagonal A, one channel, in plain Python."""
    z, r = sigmoid(w[0] * h + x[0]), sigmoid(w[1] * h + x[1])
    c = math.tanh(w[2] * (h * r) + x[2])
    return ((1 - z) * h + z * c,)


def flash_lstm(x, w, h, c):
    f, z = sigmoid(w[0] * h + w[3] * c + x[0]), math.tanh(w[2] * h + x[2])
    c = f * c + (1 - f) * z
    o = sigmoid(w[1] * h + w[4] * c + x[1])
    return o * math.tanh(c), c


@pytest.mark.parametrize("name", CELLS)
def test_equations(name):
    call = make(CELLS[name], Case(2, 5, 1, 3, ("state",)), torch.float64)
    h, last = getattr(reference, name)(**call)
    x, weight = call["x"].tolist(), torch.cat([call[k] for k in ("a", "p") if k in call]).T.tolist()
    for b in range(2):
        for d in range(3):
            states = tuple(s[b, d].item() for s in call["state"])
            for t in range(5):
                row = [x[b][t][g][d] for g in range(3)]
                states = globals()[name](row, weight[d], *states)
                assert abs(h[b, t, d].item() - states[0]) < 1e-14
            for s, want in zip(last, states, strict=True):
                assert abs(s[b, d].item() - want) < 1e-14


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("name", CELLS)
def test_gradcheck(name, options):
    """Analytic gradients of x, the weights and the states against finite differences."""
    call = make(CELLS[name], Case(2, 4, 1, 3, options), torch.float64)
    call, named = leaves(call)

    def outputs(*_):
        h, last = getattr(reference, name)(**call)
        return (h, *last)

    assert torch.autograd.gradcheck(outputs, tuple(named.values()))


@pytest.mark.parametrize("name", CELLS)
def test_channels_do_not_mix(name):
    call = make(CELLS[name], Case(1, 4, 1, 5, ("state",)), torch.float64)
    h, _ = getattr(reference, name)(**call)
    call["x"][..., 2] += 1
    changed, _ = getattr(reference, name)(**call)
    assert torch.equal((changed != h).flatten(0, 1).any(0), torch.arange(5) == 2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [None, 1, 3])
def test_scans(n, reverse):
    """Against the closed form, the sum of products, and gradcheck."""
    B, T, D = 2, 5, 3
    size = () if n is None else (n,)
    a = torch.randn(B, T, D, *size, *size, dtype=torch.float64)
    b, h0 = (torch.randn(B, *t, D, *size, dtype=torch.float64) for t in ((T,), ()))
    scan = reference.linear_scan if n is None else reference.block_scan
    h = scan(a, b, h0, reverse=reverse)
    order = list(reversed(range(T))) if reverse else list(range(T))
    for k, t in enumerate(order):
        terms = [(h0, order[: k + 1])] + [
            (b[:, s], order[j + 1 : k + 1]) for j, s in enumerate(order[: k + 1])
        ]
        want = 0
        for value, through in terms:
            for s in through:
                value = (
                    a[:, s] * value if n is None else torch.einsum("bdij,bdj->bdi", a[:, s], value)
                )
            want = want + value
        assert_close(f"h[{t}]", h[:, t], want, 2e-15)
    tensors = [v.requires_grad_() for v in (a, b, h0)]
    assert torch.autograd.gradcheck(lambda *v: scan(*v, reverse=reverse), tensors)


@pytest.mark.parametrize(
    ("backend", "words", "steps", "method"),
    [
        ("cuda", 32, 4096, "multiple_shooting"),
        ("cuda", 16384, 4096, "sequential"),
        ("cuda", 32, 64, "sequential"),
        ("cpu", 32, 4096, "sequential"),
        ("reference", 32, 4096, "sequential"),
    ],
)
def test_auto_goes_parallel_in_time_where_few_channels_are_long(backend, words, steps, method):
    assert select_method("auto", backend, words, steps) == method
