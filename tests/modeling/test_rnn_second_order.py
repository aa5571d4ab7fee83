"""Tests second derivatives of the stand-ins for torch.nn's modules: create_graph=True."""

import warnings
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from numerics import assert_close
from torch_twins import make_twins

I, D, B, T = 3, 4, 2, 5
SEQUENCES = {
    "LSTM": (flashcell.LSTM, {}),
    "LSTM of 2 layers, both ways": (flashcell.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM with a projection": (flashcell.LSTM, {"proj_size": 2}),
    "LSTM without a bias": (flashcell.LSTM, {"bias": False, "batch_first": True}),
    "GRU": (flashcell.GRU, {"num_layers": 2}),
    "GRU both ways": (flashcell.GRU, {"bidirectional": True, "batch_first": True}),
    "RNN": (flashcell.RNN, {}),
    "RNN with relu": (flashcell.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}
CELLS = {"LSTMCell": flashcell.LSTMCell, "GRUCell": flashcell.GRUCell, "RNNCell": flashcell.RNNCell}
pytestmark = pytest.mark.filterwarnings("ignore:create_graph=True")
without_cudnn = partial(torch.backends.cudnn.flags, enabled=False, allow_tf32=False)
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="fp64 on CUDA runs cuDNN, which refuses")


def flat(result):
    """Returns all tensors of a module's result."""
    y, last = result
    return (y, *(last if isinstance(last, tuple) else (last,)))


@on_cpu
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name):
    kind, options = SEQUENCES[name]
    module = kind(I, D, dtype=torch.float64, **options)
    shape = (B, T, I) if options.get("batch_first") else (T, B, I)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = tuple(module.parameters())

    def run(x, *parameters):
        given = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return flat(torch.func.functional_call(module, given, (x,)))

    assert gradcheck(run, (x, *parameters), fast_mode=True)
    assert gradgradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("with_state", [True, False])
def test_cells(name, with_state):
    cell = CELLS[name](I, D, dtype=torch.float64)
    x = torch.randn(B, I, dtype=torch.float64, requires_grad=True)
    count = (2 if name == "LSTMCell" else 1) if with_state else 0
    states = [torch.randn(B, D, dtype=torch.float64, requires_grad=True) for _ in range(count)]

    def run(x, *states):
        hx = None if not states else states if name == "LSTMCell" else states[0]
        return cell(x, hx)

    assert gradgradcheck(run, (x, *states))


@on_cpu
def test_packed_sequences_and_states():
    module = flashcell.LSTM(I, D, dtype=torch.float64)
    x = torch.randn(T, 3, I, dtype=torch.float64, requires_grad=True)
    h = torch.randn(1, 3, D, dtype=torch.float64, requires_grad=True)

    def run(x, h):
        y, (h_n, c_n) = module(pack_padded_sequence(x, [2, 5, 3], enforce_sorted=False), (h, h))
        return y.data, h_n, c_n

    assert gradgradcheck(run, (x, h))
    assert gradgradcheck(lambda x: module(pack_padded_sequence(x, [5, 5, 1]))[0].data, (x,))


@pytest.mark.parametrize("name", [n for n in SEQUENCES if "projection" not in n])
def test_by_the_cells_ops(fused_rnn, name):
    """What runs the layers again on CUDA computes what torch's functions do."""
    second_order = import_module(f"{fused_rnn.__name__}.second_order")
    kind, options = SEQUENCES[name]
    module = kind(I, D, **{"num_layers": 2, **options})
    cell = {"LSTM": "lstm", "GRU": "gru"}.get(name[:4].strip())
    cell = cell or f"rnn_{module.nonlinearity}"
    gates = module.weight_hh_l0.shape[0] // D
    x = torch.randn(*((B, T) if module.batch_first else (T, B)), I)
    count = module.num_layers * (1 + module.bidirectional)
    state = list(torch.randn(2 if cell == "lstm" else 1, count, B, D))
    directions = 1 + module.bidirectional
    given = (), module.bias, False, directions, module.batch_first, None, None, None
    weights = list(module.parameters())
    for hx in (state, []):
        call = cell, gates, x, hx, weights, given
        with second_order._plain_torch():
            want, last = second_order.run(*call)
        got, own = second_order.run_cells(*call)
        torch.testing.assert_close([got, *own], [want, *last])


@pytest.mark.parametrize("name", CELLS)
def test_cells_by_the_cells_ops(fused_rnn, name):
    second_order = import_module(f"{fused_rnn.__name__}.second_order")
    module = CELLS[name](I, D)
    cell = {"LSTMCell": "lstm", "GRUCell": "gru"}.get(name, "rnn_tanh")
    gates = module.weight_hh.shape[0] // D
    x, state = torch.randn(B, I), list(torch.randn(2 if cell == "lstm" else 1, B, D))
    given = (), True, False, 1, False, None, None, None
    call = cell, gates, x, state, list(module.parameters()), given
    want, last = second_order.run(*call)
    got, own = second_order.run_cells(*call)
    torch.testing.assert_close([got, *own], [want, *last])


def test_first_derivatives_are_the_kernels():
    """With and without create_graph the gradients agree; the warning comes with it alone."""
    module = flashcell.GRU(8, 16, num_layers=2)
    module.kernel_backend = DEVICE  # not cuDNN
    x = torch.randn(9, 3, 8, requires_grad=True)
    sources = [x, *module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = torch.autograd.grad(module(x)[0].pow(2).sum(), sources)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = torch.autograd.grad(module(x)[0].pow(2).sum(), sources, create_graph=True)
    assert any("create_graph=True: fused_rnn has no second" in str(w.message) for w in said) == (
        DEVICE == "cpu"
    )
    bound = 1e-5 if DEVICE == "cpu" else 5e-3  # the kernel's products are in TF32 there
    torch.testing.assert_close(again, own, rtol=bound, atol=bound)


def test_a_gradient_penalty_is_torchs():
    """A step of WGAN-GP (arXiv 1704.00028) changes the critic as it does with torch.nn's module."""

    def step(critic):
        torch.manual_seed(3)
        real, fake = torch.randn(2, 6, 7, 5)
        mixed = torch.lerp(real, fake, torch.rand(6, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        return [p.grad for p in critic.parameters()]

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    critic = Critic()
    with torch.backends.mkldnn.flags(enabled=False), without_cudnn():
        want = [g.clone() for g in step(critic)]
    critic.zero_grad()
    flashcell.replace(critic, backend=DEVICE)
    torch.testing.assert_close(step(critic), want, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_differentiated_twice_is_refused():
    module = flashcell.LSTM(I, D, num_layers=2)
    x = torch.randn(T, B, I, requires_grad=True)
    h, c = torch.zeros(2, B, D), torch.zeros(2, B, D)
    y, _ = module(x, (h, c))
    h.add_(1)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="an initial state was changed in place"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_torchs_switches_stay():
    before = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    cell = flashcell.LSTMCell(I, D)
    x = torch.randn(B, I, requires_grad=True)
    torch.autograd.grad(cell(x)[0].sum(), x, create_graph=True)
    assert (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled) == before


@on_cpu
def test_hessian_vector_products():
    module = flashcell.RNN(I, D, dtype=torch.float64)
    torchs = nn.RNN(I, D, dtype=torch.float64)
    torchs.load_state_dict(module.state_dict())
    x, v = torch.randn(2, T, B, I, dtype=torch.float64)
    products = [
        torch.autograd.functional.hvp(lambda x, m=m: m(x)[0].pow(3).sum(), x, v)[1]
        for m in (module, torchs)
    ]
    torch.testing.assert_close(*products)


def chained(module, x):
    """Calls in which an input depends on another one, or is the same tensor."""
    first, last = x[0], None
    if isinstance(module, nn.RNNCellBase):
        for row in x:
            last = module(row, last)
        last = last[0] if isinstance(last, tuple) else last
        return last, module(
            first @ first.mT @ last, (last, last) if "LSTM" in str(module) else last
        )
    y, last = module(x)
    again, last = module(y, last)  # as wide as the input
    pair = isinstance(module, nn.LSTM)
    same = last[0] if pair else last
    return again, module(x, (same, same) if pair else same)[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_inputs_that_depend_on_each_other(kind):
    theirs, ours = make_twins(kind, D, D, backend=DEVICE, gain=1.0)
    x = torch.randn(T, B, D, requires_grad=True)
    found = []
    for module in (theirs, ours):
        leaves = (x, *module.parameters())
        with without_cudnn():
            loss = sum(flat_output(t).square().sum() for t in chained(module, x))
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            twice = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        found.append((*grads, *twice))
    for number, (wanted, one) in enumerate(zip(*found, strict=True)):
        assert_close(f"gradient {number}", one, wanted, 1e-4)


def flat_output(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_through_a_gradient_of_torch_func(kind):
    """The function that torch.func.vjp returns is differentiated by torch.autograd, outside."""
    theirs, ours = make_twins(kind, I, D, backend=DEVICE, gain=1.0)
    x = torch.randn(*((B, I) if "Cell" in kind else (T, B, I)), requires_grad=True)
    found = []
    for module in (theirs, ours):
        with without_cudnn():
            y, pull = torch.func.vjp(lambda x, m=module: flat_output(m(x)), x)
            (dx,) = pull(torch.ones_like(y))
            leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
            second = torch.autograd.grad(dx.square().sum(), leaves, allow_unused=True)
        found.append(
            [torch.zeros_like(x) if g is None else g for g, x in zip(second, leaves, strict=True)]
        )
    for number, (wanted, one) in enumerate(zip(*found, strict=True)):
        assert_close(f"second derivative {number}", one, wanted, 1e-4)


@pytest.mark.filterwarnings("ignore:the kernel has no second derivatives")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_gradients_of_gradients_by_torch_func(kind):
    theirs, ours = make_twins(kind, I, D, backend=DEVICE, gain=1.0)
    x = torch.randn(*((B, I) if "Cell" in kind else (T, B, I)))
    found = []
    for module in (theirs, ours):

        def loss(weights, m=module):
            return flat_output(torch.func.functional_call(m, weights, (x,))).square().sum()

        def penalty(weights, loss=loss):
            return sum(g.square().sum() for g in torch.func.grad(loss)(weights).values())

        with without_cudnn(), torch.backends.mkldnn.flags(enabled=False):
            found.append(torch.func.grad(penalty)(dict(module.named_parameters())))
    for name, wanted in found[0].items():
        assert_close(name, found[1][name], wanted, 1e-4)


def test_frozen_flags(monkeypatch):
    """torch.backends.disable_global_flags(), as torch's own tests call it, forbids setting flags."""
    module = flashcell.GRU(I, D, backend=DEVICE)
    x = torch.randn(T, B, I, requires_grad=True)
    (before,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
    names = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(names, "__allow_nonbracketed_mutation_flag", False)
    was = torch.backends.mkldnn.enabled
    (dx,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert torch.equal(dx, before)
    assert torch.backends.mkldnn.enabled == was
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.mkldnn.enabled = was
