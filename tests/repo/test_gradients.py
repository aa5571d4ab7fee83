"""Tests that tests/support/gradients.py finds shared memory, so that a passing suite is evidence."""

import pytest
import torch

from gradients import overlapping


class Halves(torch.autograd.Function):
    """Two inputs, whose gradients are views of one buffer, which overlap if they are `wide`."""

    @staticmethod
    def forward(ctx, a, b, wide):
        ctx.wide = wide
        return a + b

    @staticmethod
    def backward(ctx, dy):
        buffer = dy.repeat(2)
        n = len(dy)
        return buffer[:n], buffer[n - 1 : -1] if ctx.wide else buffer[n:], None


def leaves():
    return [torch.ones(4, requires_grad=True) for _ in range(2)]


def test_views_of_one_sum():
    a, b = leaves()
    with pytest.raises(AssertionError, match=r"gradient of leaf .* and the gradient of leaf"):
        (a.view(2, 2) + b.view(2, 2)).square().sum().backward()
    with pytest.raises(AssertionError, match="share memory"):
        torch.autograd.grad((a + b).sum(), [a, b])


@pytest.mark.parametrize("wide", [False, True])
def test_views_of_one_buffer(wide):
    a, b = leaves()
    loss = Halves.apply(a, b, wide).square().sum()
    if not wide:
        loss.backward()
        return
    with pytest.raises(AssertionError, match="share memory"):
        loss.backward()


class Own(torch.autograd.Function):
    """Half the square, with the input itself as gradient."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.square().sum() / 2

    @staticmethod
    def backward(ctx, dy):
        return ctx.saved_tensors[0]


def test_a_leaf_as_its_own_gradient():
    a, _ = leaves()
    with pytest.raises(AssertionError, match="share memory"):
        torch.autograd.grad(Own.apply(a), [a])


def test_exact_for_strided_views():
    x = torch.zeros(4, 4)
    columns = [(str(k), x[:, k]) for k in range(4)]
    assert overlapping(columns) is None
    assert overlapping([*columns, ("row", x[2])]) in ("row and 0", "0 and row", "1 and row")
