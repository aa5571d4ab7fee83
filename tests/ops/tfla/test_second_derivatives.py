"""Tests second derivatives of mLSTM (create_graph=True)."""

import pytest
import torch

from cases import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:create_graph=True:RuntimeWarning")
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float32
B, T, H, K, V = 2, 5, 2, 8, 8


def draw(*shape):
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE).mul_(0.5).requires_grad_()


def call(kernel, gate, backend, **options):
    """Returns a function of q, k, v, i, f, C, out_gate and norm_weight."""
    n = torch.rand(B, H, K, dtype=DTYPE, device=DEVICE)
    m = torch.rand(B, H, dtype=DTYPE, device=DEVICE)

    def run(q, k, v, i, f, C, out_gate, norm_weight):
        state = (C, n, m) if gate == "exp" else (C,)
        h, last = kernel.mlstm(
            q, k, v, i, f, state, input_gate=gate, out_gate=out_gate, norm="rms", norm_weight=norm_weight,
            backend=backend, **options,
        )  # fmt: skip
        return h, last[0]

    return run


def inputs():
    rows = [draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H)]
    return *rows, draw(B, H, K, V), draw(B, T, H, V), draw(H, V)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_inputs_that_depend_on_each_other(tfla, gate):
    q, _, _, i, f, C, _, weight = inputs()
    found = []
    for backend in (DEVICE, "reference"):
        torch.manual_seed(0)
        run = call(tfla, gate, backend)
        h, last = run(q, q, 1.5 * q, i, f, C, q, weight)
        y, _ = run(h, q, h, i, i, last, h, weight)
        leaves = q, i, f, C, weight
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append((*first, *second))
    bound = 1e-10 if torch.float64 == DTYPE else 1e-4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("masks", ["none", "masks"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_they_are_the_references(tfla, gate, masks):
    options = {}
    if masks == "masks":
        options["reset"] = torch.rand(B, T, device=DEVICE) < 0.3
        options["lengths"] = torch.tensor([T, 3], device=DEVICE)
    given, found = inputs(), []
    for backend in (DEVICE, "reference"):
        torch.manual_seed(0)
        h, C = call(tfla, gate, backend, **options)(*given)
        total = h.square().sum() + C.square().sum()
        first = torch.autograd.grad(total, given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
        found.append([*first, *second])
    bound = 1e-11 if torch.float64 == DTYPE else 1e-4
    for g, w in zip(*found, strict=True):
        torch.testing.assert_close(g, w, rtol=bound, atol=bound)


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel on CUDA has no fp64")
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_gradgradcheck(tfla, gate, fast):
    torch.manual_seed(0)
    run = call(tfla, gate, DEVICE)
    only_h = lambda *given: run(*given)[
        0
    ]  # with the exponential gate, gradients of C are at fixed m
    assert torch.autograd.gradgradcheck(only_h if gate == "exp" else run, inputs(), fast_mode=fast)
