"""What a held step holds never matters: NaN in its inputs and in the gradient of its h change no bit of the
outputs, the states and the gradients, which are 0 there."""

import pytest
import torch

from cases import DEVICE

B, T = 2, 37
BACKENDS = [DEVICE, "reference"]
DTYPES = [torch.float32, torch.bfloat16]


def held():
    hold = torch.rand(B, T) < 0.4
    hold[0, 0] = hold[1, -1] = True
    return hold


def results(run, tensors, held_in, hold, value):
    """h, the states and all gradients; the first `held_in` tensors are [B, T, ...] and hold `value`."""
    torch.manual_seed(1)
    leaves = [t.clone() for t in tensors]
    for t in leaves[:held_in]:
        t[hold] = value
    leaves = [t.requires_grad_() for t in leaves]
    h, states = run(*leaves)
    dh = torch.randn_like(h)
    dh[hold] = value
    wanted = [h, *(s for s in states if s.requires_grad)]
    grads = torch.autograd.grad(wanted, leaves, [dh, *map(torch.ones_like, wanted[1:])])
    return [h.detach(), *(s.detach() for s in states), *grads]


def check(run, tensors, held_in, hold):
    clean, dirty = (results(run, tensors, held_in, hold, x) for x in (0.5, float("nan")))
    for k, (a, b) in enumerate(zip(clean, dirty, strict=True)):
        assert torch.equal(a, b), k
    for x in (dirty[0], *dirty[len(dirty) - len(tensors) :][:held_in]):
        assert not x[hold].count_nonzero()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", [("exp", None), ("sigmoid", None), ("sigmoid", "floor")], ids=str)
def test_mlstm(tfla, cell, dtype, backend):
    gate, normalize = cell
    hold, reset = held(), torch.rand(B, T) < 0.1
    rows = [torch.randn(B, T, 2, 16).to(dtype) for _ in range(3)]
    gates = [torch.randn(B, T, 2) for _ in range(2)]
    state = [torch.randn(B, 2, 16, 16)] + [torch.randn(B, 2, 16)] * (
        gate == "exp" or bool(normalize)
    )
    m = [torch.randn(B, 2)] * (gate == "exp")
    options = {"input_gate": gate, "normalize": normalize, "chunk_size": 16, "backend": backend}
    run = lambda q, k, v, i, f, *state: tfla.mlstm(
        q, k, v, i, f, (*state, *m), hold=hold, reset=reset, **options
    )
    check(run, [*rows, *gates, *state], 5, hold)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu", "slstm"])
@pytest.mark.parametrize("D", [8, 96])
def test_fused(fused_rnn, cell, D, dtype, backend):
    spec, hold, reset = fused_rnn.CELLS[cell], held(), torch.rand(B, T) < 0.1
    x, bias = torch.randn(B, T, spec.gates, 2, D), torch.randn(spec.bias_rows, 2, D)
    weight = torch.randn(spec.gates, 2, D, D) / D
    state = [torch.rand(B, 2, D) for _ in range(spec.states)]
    run = lambda x, weight, bias, *state: fused_rnn.recurrent(
        cell, x, weight, bias, state, hold=hold, reset=reset, backend=backend
    )
    check(run, [x.to(dtype), weight.to(dtype), bias.to(dtype), *state], 1, hold)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["walk", "shoot", "newton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["flash_gru", "flash_lstm"])
def test_diagonal(diagonal_rnn, cell, dtype, method, backend):
    if method != "walk" and backend == "cpu":
        pytest.skip("the CPU walks")
    spec, hold, reset = diagonal_rnn.CELLS[cell], held(), torch.rand(B, T) < 0.1
    rows = [torch.randn(n, 16) for n in (3, spec.weights - 3, 3) if n]
    state = [torch.randn(B, 16) for _ in range(spec.states)]

    def run(x, *rest):
        *weights, bias = rest[: len(rows)]
        options = {"hold": hold, "reset": reset, "method": method, "backend": backend}
        return getattr(diagonal_rnn, cell)(x, *weights, rest[len(rows) :], bias=bias, **options)

    check(run, [torch.randn(B, T, 3, 16).to(dtype), *rows, *state], 1, hold)
