"""Tests second derivatives of the diagonal cells, the scans and the convolution (create_graph=True)."""

import pytest
import torch

from cases import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:create_graph=True:RuntimeWarning")
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float32
B, T, D = 2, 5, 3


def draw(*shape):
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE).mul_(0.5).requires_grad_()


def second_gradients(function, inputs):
    """Returns gradients of a sum of squares of the first gradients, and the first gradients."""
    y = function(*inputs)
    first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    return [*first, *second]


def calls(kernel, backend):
    reset = torch.zeros(B, T, dtype=torch.bool, device=DEVICE)
    reset[0, 2] = True
    masks = {"reset": reset, "lengths": torch.tensor([T, 3], device=DEVICE), "backend": backend}
    yield (
        lambda x, a, s: kernel.flash_gru(x, a, (s,), **masks)[0],
        (draw(B, T, 3, D), draw(3, D), draw(B, D)),
    )
    yield (
        lambda x, a, b: kernel.flash_gru(x, a, bias=b, backend=backend)[1][0],
        (draw(2, B, T, 3, D), draw(3, 2 * D), draw(3, 2 * D)),
    )
    yield (
        lambda x, a, p, h, c: torch.stack(kernel.flash_lstm(x, a, p, (h, c), **masks)[1]),
        (draw(B, T, 3, D), draw(3, D), draw(2, D), draw(B, D), draw(B, D)),
    )
    for reverse in (False, True):
        yield (
            lambda a, b, h, r=reverse: kernel.linear_scan(a, b, h, reverse=r, backend=backend),
            (draw(B, T, D), draw(B, T, D), draw(B, D)),
        )
    for reverse in (False, True):
        yield (
            lambda a, b, h, r=reverse: kernel.block_scan(a, b, h, reverse=r, backend=backend),
            (draw(B, T, D, 2, 2), draw(B, T, D, 2), draw(B, D, 2)),
        )
    yield (
        lambda x, w, b: kernel.causal_conv(x, w, b, silu=True, reset=reset),
        (draw(B, T, D), draw(D, 4), draw(D)),
    )

    def carried(x, a, s):  # inputs that depend on each other
        h, (s,) = kernel.flash_gru(x, a, (s,), backend=backend)
        return kernel.flash_gru(x * h[:, :, None], a, (s,), backend=backend)[0]

    yield carried, (draw(B, T, 3, D), draw(3, D), draw(B, D))
    yield (
        lambda a, h: kernel.linear_scan(a, a, h * a[:, 0], backend=backend),
        (draw(B, T, D), draw(B, D)),
    )


@pytest.mark.parametrize("number", range(10))
def test_they_are_the_references(diagonal_rnn, number):
    function, inputs = list(calls(diagonal_rnn, DEVICE))[number]
    exact, _ = list(calls(diagonal_rnn, "reference"))[number]
    got, want = second_gradients(function, inputs), second_gradients(exact, inputs)
    bound = 1e-12 if torch.float64 == DTYPE else 1e-5  # observed 4e-16 in fp64
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=bound, atol=bound)


@pytest.mark.filterwarnings("ignore:the kernel has no second derivatives by torch.func")
@pytest.mark.parametrize("number", range(10))
def test_gradients_of_gradients_by_torch_func(diagonal_rnn, number):
    function, inputs = list(calls(diagonal_rnn, "auto"))[number]
    exact, _ = list(calls(diagonal_rnn, "reference"))[number]
    inputs, places = tuple(t.detach() for t in inputs), tuple(range(len(inputs)))
    found = []
    for run in (function, exact):
        loss = lambda *given, run=run: run(*given).square().sum()
        first = torch.func.grad(loss, places)
        penalty = lambda *given, first=first: sum(g.square().sum() for g in first(*given))
        found.append(torch.func.grad(penalty, places)(*inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels on CUDA have no fp64")
@pytest.mark.parametrize("number", range(10))
def test_gradgradcheck(diagonal_rnn, number):
    function, inputs = list(calls(diagonal_rnn, DEVICE))[number]
    assert torch.autograd.gradgradcheck(function, inputs)


def test_it_warns(diagonal_rnn):
    function, inputs = next(calls(diagonal_rnn, DEVICE))
    with pytest.warns(RuntimeWarning, match="the reference computes these gradients"):
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)


@pytest.mark.parametrize("name", ["linear_scan", "block_scan"])
def test_a_scan_without_steps(diagonal_rnn, name):
    shape = (2, 0, 4, 3) if name == "block_scan" else (2, 0, 4)
    a = torch.randn(*shape, *shape[3:], requires_grad=True)
    b, h0 = torch.randn(shape, requires_grad=True), torch.randn(2, *shape[2:], requires_grad=True)
    h = getattr(diagonal_rnn, name)(a, b, h0)
    found = torch.autograd.grad(h.sum(), (a, b, h0), create_graph=True)
    assert [d.shape for d in found] == [t.shape for t in (a, b, h0)]
    assert not found[2].any()
