"""Tests tfla's gradients of saturated gates, and held steps with any contents."""

import pytest
import torch

from cases import DEVICE

B, H, D = 2, 2, 24
CELLS = [("exp", None), ("sigmoid", None), ("sigmoid", "floor")]
DTYPES = [torch.float32, torch.bfloat16] + [torch.float64] * (DEVICE == "cpu")


def inputs(T, dtype, gate):
    """Returns q, k, v, i, f; the forget gates are +-`gate` at random."""
    q, k, v = (torch.randn(B, T, H, D).to(dtype) for _ in range(3))
    i, f = (torch.randn(B, T, H) for _ in range(2))
    return q, k, v, i, gate * f.sign()


def draw(masks, T):
    """Draws masks: some steps reset and some held, or rows split into sequences."""
    if "cu_seqlens" in masks:
        return {"cu_seqlens": torch.tensor([0, 150, 151, T, B * T], dtype=torch.int32)}
    return {name: torch.rand(B, T) < 0.05 for name in masks}


def gradients(run, tensors, weight, dtype, **options):
    leaves = [t.detach().to(torch.promote_types(t.dtype, dtype)).requires_grad_() for t in tensors]
    h, state = run(*leaves, **options)
    loss = (h * weight.to(h.dtype)).sum() + sum(s.square().sum() for s in state[:1])
    return torch.autograd.grad(loss, leaves)


def error(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


# The allowed error, in errors of the reference. Tensor cores truncate sums where others round: dv,
# which no gate affects, has 4.5 times the reference's error on them.
TIMES = 8 if DEVICE == "cuda" else 4
# The error allowed where the reference has almost none. A sum over 24 on tensor cores is three parts,
# each in three passes of TF32, and each of the nine additions cuts off half of a last place on average.
FLOOR = {torch.float32: 9 * 2.0**-24 if DEVICE == "cuda" else 4e-7, torch.bfloat16: 2.0**-8}


def check(tfla, cell, T, gate, dtype, backend=DEVICE, chunk_size=None, **masks):
    check_inputs(tfla, cell, inputs(T, dtype, gate), backend, chunk_size, **masks)


def check_inputs(tfla, cell, tensors, backend=DEVICE, chunk_size=None, **masks):
    """Tests that the inputs' gradients are as exact as the reference in the dtype.

    Step by step, in chunks of one, nothing cancels. A divisor near 0 makes an error large or
    small by chance: the reference's is the largest of three chunk sizes'.
    """
    (_, T, *_), dtype = tensors[0].shape, tensors[0].dtype
    weight = torch.randn(B, T, H, D).to(dtype)
    if "cu_seqlens" in masks:  # all in one row
        *tensors, weight = (t.flatten(0, 1)[None] for t in (*tensors, weight))
    options = {"input_gate": cell[0], "normalize": cell[1], **masks}
    exact, mine, *peers = (
        gradients(tfla.mlstm, tensors, weight, to, backend=backend, chunk_size=size, **options)
        for backend, to, size in (
            ("reference", torch.float64, 1),
            (backend, dtype, chunk_size),
            *(("reference", dtype, size) for size in (None, 2, 8)),
        )
    )
    for name, want, got, *by_torch in zip("qkvif", exact, mine, *peers, strict=True):
        largest = max(error(peer, want) for peer in by_torch)
        allowed = max(TIMES * largest, FLOOR.get(dtype, 1e-12))
        assert error(got, want) < allowed, name


@pytest.mark.thin
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [3.0, 6.0, 12.0, 20.0])
@pytest.mark.parametrize("T", [40, 419])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forget_gates_of_both_signs(tfla, cell, T, gate, dtype):
    """Forget gates of both signs: what crosses a shut gate is little, and open gates have small
    slopes, so errors could hide there."""
    check(tfla, cell, T, gate, dtype)


@pytest.mark.thin
@pytest.mark.parametrize("mean", [-0.9, 0.5, 3.0])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forget_gates_that_are_half_open(tfla, cell, mean):
    """No gate is shut, and d lf is small beside the sums whose difference it is."""
    check_half_open(tfla, cell, mean)


def check_half_open(tfla, cell, mean, **options):
    q, k, v, i, f = inputs(256, torch.bfloat16, 1.0)
    f = (mean + torch.randn_like(f)).clamp(min=-0.95)
    check_inputs(tfla, cell, (q, k, v, i, f), **options)


MASKS = [("reset",), ("hold",), ("reset", "hold"), ("cu_seqlens",)]


@pytest.mark.thin
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forget_gates_with_masks(tfla, cell, masks, dtype):
    check(tfla, cell, 301, 12.0, dtype, **draw(masks, 301))
