"""Tests the block GRU against DreamerV3's equations, written unit by unit in NumPy, and its gradients
against those of the plain loop."""

import math

import numpy as np
import pytest
import torch

import flashcell
from cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="torch runs it on any device")
KINDS = {
    "2024": {"blocks": 4, "dense": 5},
    "two layers": {"blocks": 2, "dense": 3, "layers": 2, "activation": "gelu", "norm": "layer"},
    "2023": {
        "blocks": 1, "dense": None, "layers": 0, "norm": "layer", "norm_gates": True, "bias": False,
        "eps": 1e-3,
    },
    "plain": {"blocks": 4, "dense": None, "layers": 0, "norm": None},
}  # fmt: skip
INPUT, WIDTH = 3, 8


def draw(kind, module=flashcell.BlockGRU, dtype=torch.float64):
    made = module(INPUT, WIDTH, **KINDS[kind], dtype=dtype)
    with torch.no_grad():  # norms and biases that are not 1 and 0
        for name, p in made.named_parameters():
            if "norm" in name or "bias" in name:
                p += 0.3 * torch.randn_like(p)
    return made


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def activation(name, x):
    if name == "silu":
        return x * sigmoid(x)
    return np.array([0.5 * v * (1 + math.erf(v / 2**0.5)) for v in x])  # gelu


def normalise(kind, module, x):
    named = KINDS[kind].get("norm", "rms")
    if named is None or isinstance(module, torch.nn.Identity):
        return x
    weight, eps = module.weight.detach().numpy(), KINDS[kind].get("eps", 1e-4)
    if named == "rms":
        return x / np.sqrt((x * x).mean() + eps) * weight
    return (x - x.mean()) / np.sqrt(x.var() + eps) * weight + module.bias.detach().numpy()


def blocks(layer, groups):
    """Returns [G][D]: each block's matrix times what this block reads."""
    G, J = layer.gates, layer.hidden_size // layer.num_heads
    weight = layer.weight.detach().numpy()
    out = np.zeros((G, layer.hidden_size))
    for n, group in enumerate(groups):
        for g in range(G):
            out[g, n * J : (n + 1) * J] = weight[n, g] @ group
    return out if layer.bias is None else out + layer.bias.detach().numpy()


def step(kind, cell, x, h):
    """One step of one sequence: x [I], h [D]."""
    act = lambda v: activation(KINDS[kind].get("activation", "silu"), v)
    shared = [x]
    if cell.dense is not None:
        u = cell.dense.weight.detach().numpy() @ h + cell.dense.bias.detach().numpy()
        shared.insert(0, act(normalise(kind, cell.dense_norm, u)))
    groups = [np.concatenate([own, *shared]) for own in np.split(h, cell.blocks)]
    for layer, norm in zip(cell.hidden, cell.hidden_norms, strict=True):
        a = act(normalise(kind, norm, blocks(layer, groups)[0]))
        groups = np.split(a, cell.blocks)
    gates = normalise(kind, cell.gate_norm, blocks(cell.gates, groups).flatten())
    reset, candidate, update = np.split(gates, 3)
    candidate, update = np.tanh(sigmoid(reset) * candidate), sigmoid(update - 1)
    return update * candidate + (1 - update) * h


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_dreamers(kind):
    rnn = draw(kind)
    x, h = torch.randn(2, 5, INPUT).double(), torch.randn(2, WIDTH).double()
    reset = torch.tensor([[False] * 5, [True, False, False, True, False]])
    hs, last = rnn(x, h, reset)
    for b in range(2):
        state = h[b].numpy()
        for t in range(5):
            state = step(kind, rnn, x[b, t].numpy(), state * (not reset[b, t]))
            np.testing.assert_allclose(hs[b, t].detach().numpy(), state, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(last[b].detach().numpy(), state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [0, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sequence_is_the_cell(kind, T):
    rnn, cell = draw(kind), draw(kind, flashcell.BlockGRUCell)
    cell.load_state_dict(rnn.state_dict())
    x, h = torch.randn(3, T, INPUT).double(), torch.randn(3, WIDTH).double()
    reset = torch.rand(3, T) < 0.3
    leaves = [x.requires_grad_(), h.requires_grad_()]
    hs, last = rnn(x, h, reset)
    state, wanted = h, []
    for t in range(T):
        state = cell(x[:, t], torch.where(reset[:, t, None], 0.0, state))
        wanted.append(state)
    want = torch.stack(wanted, 1) if T else x.new_zeros(3, 0, WIDTH)
    torch.testing.assert_close((hs, last), (want, state), rtol=1e-12, atol=1e-12)
    u, v = torch.randn_like(hs), torch.randn_like(last)
    loss = lambda hs, last: (hs * u).sum() + (last * v).sum()
    options = {"allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad(loss(hs, last), [*leaves, *rnn.parameters()], **options)
    exact = torch.autograd.grad(loss(want, state), [*leaves, *cell.parameters()], **options)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


def test_gradients_of_parts():
    """A backward of some outputs, or of some parameters, and a second one of the same graph."""
    rnn, x = draw("2024"), torch.randn(2, 4, INPUT).double()
    hs, last = rnn(x)
    parameters = list(rnn.parameters())
    of_last = torch.autograd.grad(last.sum(), parameters, retain_graph=True)
    again = torch.autograd.grad(last.sum(), parameters, retain_graph=True)
    torch.testing.assert_close(of_last, again, rtol=0, atol=0)
    of_third = torch.autograd.grad(hs[:, 2].sum(), parameters, retain_graph=True)
    assert not torch.equal(of_third[0], of_last[0])
    (alone,) = torch.autograd.grad(last.sum(), rnn.gates.weight)
    (place,) = [k for k, p in enumerate(parameters) if p is rnn.gates.weight]
    torch.testing.assert_close(alone, of_last[place], rtol=0, atol=0)


def test_second_derivatives():
    rnn, x = draw("2024"), torch.randn(2, 3, INPUT).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: rnn(x)[0], (x,))
    assert torch.autograd.gradcheck(lambda x: rnn(x)[0], (x,))
    h, last = rnn(x)
    loss = rnn(x * h.sum(), last)[0].sum()  # inputs that depend on each other
    leaves = (x, *rnn.parameters())
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    torch.testing.assert_close(again, once)


def test_without_gradients_and_with_frozen_weights():
    rnn, x = draw("2024"), torch.randn(2, 3, INPUT).double()
    want = rnn(x)
    with torch.no_grad():
        torch.testing.assert_close(rnn(x), tuple(t.detach() for t in want), rtol=0, atol=0)
    rnn.requires_grad_(False)
    assert not rnn(x)[0].requires_grad
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rnn(x)[0].sum(), x)
    assert dx.any()


def test_an_optimizer_step_between_forward_and_backward_is_noticed():
    rnn, x = draw("2024"), torch.randn(2, 3, INPUT).double()
    h, _ = rnn(x)
    with torch.no_grad():
        rnn.dense.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


@pytest.mark.parametrize("kind", ["2024", "2023"])
def test_under_transforms_and_compiled(kind):
    rnn, x = draw(kind), torch.randn(2, 3, INPUT).double()
    loss = lambda x: rnn(x)[0].square().sum()
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), want)
    v = torch.randn_like(x)
    _, tangent = torch.func.jvp(loss, (x,), (v,))
    torch.testing.assert_close(tangent, (want * v).sum())
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf), leaf)[0], want)


def test_autocast_and_other_dtypes():
    rnn, x = draw("2024", dtype=torch.float32), torch.randn(2, 6, INPUT)
    want = rnn(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        h = rnn(x)[0]
        assert h.dtype == torch.float32
    h.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in rnn.parameters())
    torch.testing.assert_close(h, want, rtol=0.1, atol=0.05)
    half, _ = rnn.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, rtol=0.1, atol=0.05)


def test_what_is_refused():
    rnn, x = draw("2024"), torch.randn(2, 3, INPUT).double()
    for options, match in (
        ({"blocks": 3}, "hidden_size is 8, but must be a multiple of blocks = 3"),
        ({"norm": "batch"}, "norm is 'batch', but must be one of 'rms', 'layer', None"),
        ({"activation": "x"}, "activation is 'x', but must be one of 'silu'"),
        ({"layers": -1}, "layers is -1, but must be an int >= 0"),
        ({"dense": 0}, "dense is 0, but must be an int >= 1"),
        ({"blocks": True}, "blocks is True, but must be an int >= 1"),
    ):
        with pytest.raises(ValueError, match=match):
            flashcell.BlockGRU(INPUT, WIDTH, **options)
    for given, match in (
        ((x[..., :2],), r"x has shape \[2, 3, 2\], but must be \[\.\.\., 3\]"),
        ((x[0],), r"x has shape \[3, 3\], but must be \[B, T, 3\]"),
        (("x",), r"x is a str, but must be"),
        ((x, x[:, 0]), r"h has shape \[2, 3\], but must be \[2, 8\]"),
        ((x, None, torch.zeros(3, 2).bool()), r"reset has shape \[3, 2\], but must be \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=match):
            rnn(*given)
    with pytest.raises(TypeError, match=r"reset has dtype torch.float32, but must be a tensor of"):
        rnn(x, None, torch.zeros(2, 3))
    assert "blocks=4" in repr(rnn)
