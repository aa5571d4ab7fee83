"""Tests the states of every step: values, and gradients that come in by way of c."""

import pytest
import torch

from cases import DEVICE, Case, upcast, with_gradients
from diagonal_cases import CASES, EMPTY, in_heads, leaves, make
from flashcell.kernels import diagonal_rnn as reference
from numerics import assert_as_accurate, assert_bitwise
from ops.diagonal_rnn.test_sequence import CELLS, DTYPES, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
LONG = Case(2, 300, 1, 24, ("state", "reset", "hold"))
METHODS = ["sequential"] if DEVICE == "cpu" else ["sequential", "multiple_shooting", "newton"]


def run(function, call, given, **options):
    """Returns h, the last states, those of every step, and the gradients of every floating input, by
    name. `given` are the gradients of h, of the last states and of c of every step; None for none."""
    call, sources = leaves(call)
    h, last, states = function(**call, return_states=True, **options)
    assert states[0] is h
    dh, dlast, dstates = given[0], given[1 : 1 + len(last)], given[1 + len(last) :]
    return with_gradients(h, last, sources, dh, dlast, states[1:], dstates)


def draw(name, call, dtype):
    dh, dlast = upstream(name, call, dtype)
    return [dh, *dlast, *torch.randn(CELLS[name].states - 1, *dh.shape).to(dtype)]


def compare(name, kernel, case, dtype, **options):
    call = make(CELLS[name], case, dtype)
    given = draw(name, call, dtype)
    got = run(getattr(kernel, name), call, given, backend=DEVICE, **options)
    peer = run(getattr(reference, name), call, given)
    exact = run(getattr(reference, name), upcast(call), given)
    assert got.keys() == exact.keys()
    for key in exact:
        # The kernel keeps c rounded to x's dtype, and gradients read it so.
        is_kept = key.startswith(("d", "states"))
        terms = case.B * case.T if key in ("da", "dp", "dbias") else case.T
        if not is_kept:
            terms = 1
        values = got[key], exact[key], peer[key]
        rounded = (dtype, is_kept) if is_kept or DEVICE == "cuda" else None
        assert_as_accurate(f"{name} {case} {key}", *values, terms, rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_they_are_the_references(diagonal_rnn, name, case, dtype):
    compare(name, diagonal_rnn, case, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_of_every_method(diagonal_rnn, method):
    compare("flash_lstm", diagonal_rnn, LONG, torch.float32, method=method)


@pytest.mark.parametrize("method", ["multiple_shooting", "newton"])
def test_of_the_references_parallel_methods(method):
    call = make(CELLS["flash_lstm"], LONG, torch.float64)
    given = draw("flash_lstm", call, torch.float64)
    want = run(reference.flash_lstm, call, given, method="sequential")
    got = run(reference.flash_lstm, call, given, method=method)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_empty_sizes(diagonal_rnn, name, case):
    call = make(CELLS[name], case, torch.float32)
    given = draw(name, call, torch.float32)
    got = run(getattr(diagonal_rnn, name), call, given, backend=DEVICE)
    want = run(getattr(reference, name), call, given)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", CELLS)
def test_of_x_in_heads(diagonal_rnn, name):
    call = make(CELLS[name], Case(3, 7, 1, 12, ("state", "bias", "reset")), torch.float32)
    given = draw(name, call, torch.float32)
    want = run(getattr(diagonal_rnn, name), call, given)
    call["x"] = in_heads(call["x"], 3)
    got = run(getattr(diagonal_rnn, name), call, given)
    want["dx"] = in_heads(want["dx"], 3)
    for key, value in want.items():
        assert_bitwise(key, got[key], value)


def test_gradients_of_one_output_alone(diagonal_rnn):
    call = make(CELLS["flash_lstm"], Case(2, 5, 1, 8, ("state",)), torch.float32)
    every = draw("flash_lstm", call, torch.float32)
    for k in range(len(every)):
        given = [d if k == at else None for at, d in enumerate(every)]
        got = run(diagonal_rnn.flash_lstm, call, given, backend=DEVICE)
        want = run(reference.flash_lstm, call, given)
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5, msg=key)


def test_without_gradients(diagonal_rnn):
    """The values are those that a call with gradients gives, and h and the last states those of a call
    without states."""
    call = make(CELLS["flash_lstm"], Case(2, 5, 1, 8, ("state", "hold")), torch.float32)
    h, last, (same, c) = diagonal_rnn.flash_lstm(**call, return_states=True)
    recorded = leaves(call)[0]
    assert_bitwise("c", c, diagonal_rnn.flash_lstm(**recorded, return_states=True)[2][1].detach())
    plain, ends = diagonal_rnn.flash_lstm(**call)
    assert_bitwise("h", h, plain)
    assert same is h
    for one, other in zip(last, ends, strict=True):
        assert_bitwise("last", one, other)
    *_, states, info = diagonal_rnn.flash_lstm(**call, return_states=True, return_info=True)
    assert len(states) == 2
    assert info.method == "sequential"


@pytest.mark.filterwarnings("ignore:create_graph=True:RuntimeWarning")
def test_second_derivatives(diagonal_rnn):
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    call = make(CELLS["flash_lstm"], Case(2, 5, 1, 3, ("state", "reset", "hold")), dtype)

    def second(function, **options):
        given, sources = leaves(call)
        _, _, (h, c) = function(**given, return_states=True, **options)
        inputs = list(sources.values())
        loss = c.square().sum() + (h * c.to(h.dtype)).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    bound = 1e-12 if dtype == torch.float64 else 1e-5
    want = second(reference.flash_lstm)
    for g, w in zip(second(diagonal_rnn.flash_lstm, backend=DEVICE), want, strict=True):
        torch.testing.assert_close(g, w, rtol=bound, atol=bound)


def test_compiled(diagonal_rnn):
    call = make(CELLS["flash_lstm"], Case(2, 5, 1, 8, ("state", "reset", "hold")), torch.float32)

    def loss(x, a, p, state):
        given = {**call, "x": x, "a": a, "p": p, "state": state}
        h, _, (_, c) = diagonal_rnn.flash_lstm(**given, return_states=True)
        return h.sum() + (c * c).sum()

    def gradients(function):
        given, sources = leaves(call)
        value = function(given["x"], given["a"], given["p"], given["state"])
        return torch.autograd.grad(value, list(sources.values()))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(loss), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_under_transforms(diagonal_rnn):
    call = make(CELLS["flash_lstm"], Case(2, 5, 1, 8), torch.float32)
    loss = lambda x, a, p: diagonal_rnn.flash_lstm(x, a, p, return_states=True)[2][1].square().sum()
    inputs = call["x"].requires_grad_(), call["a"].requires_grad_(), call["p"].requires_grad_()
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in inputs))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)


def test_a_flag_is_no_number(diagonal_rnn):
    call = make(CELLS["flash_gru"], Case(2, 5, 1, 8), torch.float32)
    with pytest.raises(TypeError, match=r"return_states is a int, but must be"):
        diagonal_rnn.flash_gru(**call, return_states=1)
