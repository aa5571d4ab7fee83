"""Tests solve through the binary's scans: mode "scan", which "auto" takes if there is a binary."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import DEVICE
from flashcell.kernels import diagonal_rnn as reference
from gradients import overlapping
from numerics import assert_close

D = 5


def diagonal(h, x, w):
    z = torch.sigmoid(w[0] * h + x[:, 0])
    return z * h + (1 - z) * torch.tanh(w[1] * h + x[:, 1])


def pairs(h, x, w):  # S = [D, 2]
    f = torch.sigmoid(w[0] * h[..., 0] + x[:, 0])
    c = f * h[..., 1] + (1 - f) * torch.tanh(w[1] * h[..., 0] + x[:, 1])
    return torch.stack([torch.tanh(c), c], -1)


def dense(h, x, w):
    return torch.tanh(0.3 * h.sum(-1, keepdim=True) * w[0] + x[:, 0])


CELLS = {diagonal: (D,), pairs: (D, 2)}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize("chunk", [1, 8])
def test_equals_the_loop(diagonal_rnn, cell, chunk):
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    tolerance = 1e-13 if DEVICE == "cpu" else 1e-5
    x, h0 = torch.randn(3, 50, 2, D, dtype=dtype), torch.randn(3, *CELLS[cell], dtype=dtype)
    given = [t.requires_grad_() for t in (x, h0, torch.rand(2, D, dtype=dtype) - 0.5)]
    results = []
    for mode in ("auto", "scan", "torch", "sequential"):
        h, last, info = diagonal_rnn.solve(
            cell, *given[:2], given[2:], chunk=chunk, mode=mode, return_info=True
        )
        assert info.mode == ("scan" if mode == "auto" else mode)
        loss = h.square().sum() + last.sum()
        results.append([h, last, *torch.autograd.grad(loss, given)])
    *others, loop = results
    for result in others:
        names = ("h", "last", "dx", "dh0", "dw")
        for name, got, want in zip(names, result, loop, strict=True):
            assert_close(name, got, want, tolerance)


def test_structures_without_a_scan(diagonal_rnn):
    x, w = torch.randn(2, 9, 2, D), torch.randn(2, D)
    options = {"params": (w,), "state_shape": (D,), "return_info": True}
    assert diagonal_rnn.solve(dense, x, **options)[2].mode == "torch"
    with pytest.raises(ValueError, match="mode is 'scan', but structure 'dense' of states"):
        diagonal_rnn.solve(dense, x, mode="scan", **options)


def test_the_reference_has_no_scan():
    x = torch.randn(2, 9, 2, D)
    with pytest.raises(RuntimeError, match=f"backend '{DEVICE}' was asked for, but this copy"):
        reference.solve(diagonal, x, params=(x[0, 0],), state_shape=(D,), mode="scan")


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("mode", ["scan", "torch", "sequential"])
def test_a_cell_that_adds_gives_separate_gradients(diagonal_rnn, mode, T):
    """torch's sum gives one gradient tensor to all operands; with one row every view of it is
    contiguous."""
    draw = lambda *shape: torch.randn(*shape, requires_grad=True)
    h0, x, y, w = draw(1, 3), draw(1, T, 3), draw(1, T, 3), draw(1, 3)
    options = {"mode": mode, "structure": "diagonal"}
    h, _ = diagonal_rnn.solve(lambda h, x, w: h + x[0] + x[1] + w, (x, y), h0, (w,), **options)
    dh = torch.ones_like(h)
    h.backward(dh)
    grads = {"h0": h0.grad, "x": x.grad, "y": y.grad, "w": w.grad, "dh": dh}
    assert overlapping(grads.items()) is None


@pytest.mark.parametrize("wrong", [None, 1.0, (torch.ones(3),)])
def test_a_jacobian_that_is_no_tensor_is_refused(diagonal_rnn, wrong):
    with pytest.raises(TypeError, match=r"jacobian_fn\(...\) is a .*, but must be a tensor"):
        diagonal_rnn.solve(
            lambda h, x: torch.tanh(h + x), torch.randn(2, 4, 3), state_shape=(3,),
            structure="diagonal", jacobian_fn=lambda h, x: wrong,
        )  # fmt: skip


def test_units_that_see_each_other_where_nothing_was_tried(diagonal_rnn):
    """The Jacobian is diagonal at the rows that are tried first, and not at the solution."""

    def cell(h, x, w):
        return torch.tanh(w * h + torch.relu(h.flip(-1) - 0.5) + x)

    x = (torch.rand(2, 40, 3, dtype=torch.float64) * 0.4).requires_grad_()
    w = torch.full((3,), 0.9, dtype=torch.float64, requires_grad=True)
    call = {"params": (w,), "state_shape": (3,)}
    gradients = lambda h: torch.autograd.grad(h.square().sum(), (x, w))
    h, _, info = diagonal_rnn.solve(cell, x, **call, return_info=True)
    wanted, _ = diagonal_rnn.solve(cell, x, **call, mode="sequential")
    assert info.structure == "dense"
    torch.testing.assert_close(gradients(h), gradients(wanted))
    with pytest.raises(ValueError, match="structure is 'diagonal', but the cell's Jacobian is not"):
        diagonal_rnn.solve(cell, x, **call, structure="diagonal")


def gate(h, x):
    return torch.sigmoid(x) * h + torch.tanh(x)


def test_by_transforms_it_is_the_plain_loop(diagonal_rnn):
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    solve = lambda x, **options: diagonal_rnn.solve(gate, x, state_shape=(3,), **options)[0]
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(solve(leaf).sum(), leaf)
    found = torch.func.grad(lambda x: solve(x).sum())(x)
    torch.testing.assert_close(found, wanted)
    y, pull = torch.func.vjp(solve, x)
    torch.testing.assert_close(pull(torch.ones_like(y))[0], wanted)
    torch.testing.assert_close(torch.func.vmap(solve)(x[None])[0], solve(x))
    with pytest.raises(NotImplementedError, match="mode is 'torch', but must be 'auto' or"):
        torch.func.grad(lambda x: solve(x, mode="torch").sum())(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_checkpoints(diagonal_rnn, reentrant):
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    solve = lambda x: diagonal_rnn.solve(gate, x, state_shape=(3,))[0]
    h = checkpoint(solve, x, use_reentrant=reentrant)
    h.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        by_hooks = solve(x)
    for result in (solve(x), by_hooks):
        torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], x.grad)


def test_results_share_no_memory(diagonal_rnn):
    x, h0 = torch.randn(2, 5, 3), torch.randn(2, 3)
    h, last = diagonal_rnn.solve(gate, x, h0)
    h.zero_()
    assert last.abs().sum() > 0
    _, last = diagonal_rnn.solve(gate, x[:, :0], h0)
    last.zero_()
    assert h0.abs().sum() > 0
