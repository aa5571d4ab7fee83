"""tfla: gradients of gates that are saturated, and steps that are held whatever is in them."""

import pytest
import torch

from cases import DEVICE

B, H, D = 2, 2, 24
CELLS = [("exp", None), ("sigmoid", None), ("sigmoid", "floor")]
DTYPES = [torch.float32, torch.bfloat16] + [torch.float64] * (DEVICE == "cpu")


def inputs(T, dtype, gate=None):
    """q, k, v, i, f; the gates +-`gate`, at random."""
    q, k, v = (torch.randn(B, T, H, D).to(dtype) for _ in range(3))
    i, f = (torch.randn(B, T, H) for _ in range(2))
    return q, k, v, i, f if gate is None else gate * f.sign()


def draw(masks, T):
    """Some steps reset and some held, or rows cut into sequences."""
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


def judge(tfla, cell, T, gate, dtype, backend=DEVICE, chunk_size=None, **masks):
    """As exact as the reference in the dtype. Step by step, in chunks of one, nothing cancels."""
    tensors, weight = inputs(T, dtype, gate), torch.randn(B, T, H, D).to(dtype)
    if "cu_seqlens" in masks:  # all in one row
        *tensors, weight = (t.flatten(0, 1)[None] for t in (*tensors, weight))
    options = {"input_gate": cell[0], "normalize": cell[1], **masks}
    exact, peer, mine = (
        gradients(tfla.mlstm, tensors, weight, to, backend=backend, chunk_size=size, **options)
        for backend, to, size in (
            ("reference", torch.float64, 1),
            ("reference", dtype, None),
            (backend, dtype, chunk_size),
        )
    )
    for name, want, by_torch, got in zip("qkvif", exact, peer, mine, strict=True):
        allowed = max(4 * error(by_torch, want), 4e-7 if dtype != torch.float64 else 1e-12)
        if dtype == torch.bfloat16:
            allowed = max(allowed, 2.0**-8)  # of operands that are rounded
        assert error(got, want) < allowed, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [3.0, 6.0, 12.0, 20.0])
@pytest.mark.parametrize("T", [40, 419])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forget_gates_of_both_signs(tfla, cell, T, gate, dtype):
    """Little crosses a shut gate, and open ones have small slopes."""
    judge(tfla, cell, T, gate, dtype)


MASKS = [("reset",), ("hold",), ("reset", "hold"), ("cu_seqlens",)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forget_gates_with_masks(tfla, cell, masks, dtype):
    judge(tfla, cell, 301, 12.0, dtype, **draw(masks, 301))
