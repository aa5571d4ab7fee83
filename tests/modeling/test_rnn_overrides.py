"""Tests the stand-ins for torch.nn's modules with inputs and weights that our kernels do not take: those
with a __torch_function__, complex numbers, sparse tensors, and biases changed later."""

import re

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from numerics import EPS, assert_close
from torch_twins import CELLS, SEQUENCES, flatten, make_twins

I, D, B, T = 3, 8, 4, 5
LOOSE = 8 * EPS[torch.float32] if DEVICE == "cpu" else 1e-5  # cuDNN's own functions


@pytest.fixture(autouse=True)
def without_tf32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


class Wrapped:
    """No tensor, but what torch's functions take for one."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        bare = lambda t: t.tensor if isinstance(t, Wrapped) else t
        args = torch.utils._pytree.tree_map(bare, args)
        return function(*args, **torch.utils._pytree.tree_map(bare, kwargs or {}))


class Named(torch.Tensor):
    """A tensor that carries more than its numbers, as fastai's do."""


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_what_stands_for_a_tensor(kind):
    theirs, ours = make_twins(kind, I, D, dtype=torch.float32)
    x = torch.randn(*((B, I) if kind in CELLS else (T, B, I)))
    for found, wanted in zip(flatten(ours(Wrapped(x))), flatten(theirs(x)), strict=True):
        assert_close("output", found, wanted, LOOSE)
    with pytest.raises(AttributeError, match="input is a list, but must be a tensor"):
        ours(x.tolist())


class Limited(torch.Tensor):
    """A tensor whose __torch_function__ knows torch's functions, and no op of ours."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if type(function).__name__.startswith("OpOverload"):
            return NotImplemented
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
@pytest.mark.parametrize("which", ["input", "states", "both"])
@pytest.mark.parametrize("training", [False, True])
def test_tensors_that_know_torch_s_functions(kind, which, training):
    theirs, ours = make_twins(kind, I, D, dtype=torch.float32)
    wrap = lambda t, name: t.as_subclass(Limited) if which in (name, "both") else t
    x = torch.randn(*((B, I) if kind in CELLS else (T, B, I)), requires_grad=training)
    s = torch.randn(*((B, D) if kind in CELLS else (1, B, D)))
    found = []
    for module in (theirs, ours):
        own = wrap(s, "states")
        given = wrap(x, "input"), (own, own) if "LSTM" in kind else own
        y = flatten(module(*given))
        grads = torch.autograd.grad(y[0].sum(), x) if training else ()
        found.append([t.as_subclass(torch.Tensor) for t in (*y, *grads)])
    assert "__torch_function__ of their own" in flashcell.explain(ours, *given)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_tensors_of_another_class_run_by_the_kernel(kind, monkeypatch):
    theirs, ours = make_twins(kind, I, D, dtype=torch.float32)
    x = torch.randn(*((B, I) if kind in CELLS else (T, B, I)))
    wanted = flatten(theirs(x))
    monkeypatch.setattr(getattr(nn, kind), "forward", lambda *_: pytest.fail("torch.nn's forward"))
    found = flatten(ours(x.as_subclass(Named)))
    assert type(found[0]) is Named
    for one, other in zip(found, wanted, strict=True):
        assert_close("output", one.as_subclass(torch.Tensor), other, LOOSE)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_weights_that_know_torch_s_functions(kind):
    """As those of torch.nn.utils' per-sample gradients, which replace torch.lstm."""
    theirs, ours = make_twins(kind, I, D, dtype=torch.float32)
    x, seen = torch.randn(*((B, I) if kind in CELLS else (T, B, I))), set()

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.add(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs or {})

    weights = {name: w.detach().as_subclass(Watched) for name, w in ours.named_parameters()}
    found = flatten(torch.func.functional_call(ours, weights, (x,)))
    names = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh", "LSTMCell": "lstm_cell"}
    assert {**names, "GRUCell": "gru_cell", "RNNCell": "rnn_tanh_cell"}[kind] in seen
    assert "__torch_function__ of their own" in flashcell.explain(ours, Wrapped(x))
    for one, other in zip(found, flatten(theirs(x)), strict=True):
        assert_close("output", one.as_subclass(torch.Tensor), other, LOOSE)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_complex_numbers(kind):
    theirs, ours = make_twins(kind, I, D, dtype=torch.complex64)
    x = torch.randn(*((B, I) if kind in CELLS else (T, B, I)), dtype=torch.complex64)
    try:
        wanted = flatten(theirs(x))
    except NotImplementedError as refusal:  # torch's LSTMs and GRUs on CUDA
        with pytest.raises(NotImplementedError, match=re.escape(str(refusal))):
            ours(x)
        return
    for found, one in zip(flatten(ours(x)), wanted, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_inputs(kind, layout):
    theirs, ours = make_twins(kind, I, D, dtype=torch.float32)
    x = torch.randn(B, I).relu().to_sparse(layout=layout)
    for found, wanted in zip(flatten(ours(x)), flatten(theirs(x)), strict=True):
        assert torch.equal(found, wanted)
    assert "no kernel of ours runs torch.sparse" in flashcell.explain(ours, x)


BIASES = [{"bias_ih": None, "bias_hh": None}, {"bias_ih": None}, {"bias_hh": None}, {"bias": False}]


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("changes", BIASES, ids=" ".join)
@pytest.mark.parametrize("autocast", [False, True])
def test_biases_of_cells_are_the_parameters(kind, changes, autocast):
    """Whatever the attribute `bias` says, as in torch.nn."""
    twins = make_twins(kind, I, D, dtype=torch.float32)
    x, found = torch.randn(B, I), []
    for module in twins:
        for name, value in changes.items():
            setattr(module, name, value)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = flatten(module(x))
        sum(o.float().sum() for o in out).backward()
        grads = [p.grad for p in module.parameters()]
        found.append([*out, *grads])
    loose = LOOSE if not autocast else 8 * EPS[torch.bfloat16]
    for want, got in zip(*found, strict=True):
        assert_close("value", got.float(), want.float(), loose)
