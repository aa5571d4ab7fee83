"""Tests the causal convolution against itself on one document at a time, in float64."""

import pytest
import torch

from cases import DEVICE
from flashcell.layers.causal_conv import CausalConv1d
from flashcell.state.boundaries import Boundaries
from numerics import EPS, assert_close

B, T, D = 3, 11, 5
SAME = 4 * EPS[torch.float64]  # five terms in another order


def one_by_one(conv, x, reset, hold, window=None):
    """Computes the definition, token by token."""
    K, ys, windows = conv.past + 1, [], []
    weight = conv.weight[:, 0]
    for b in range(len(x)):
        seen = list(window[b]) if window is not None else []
        for t in range(x.shape[1]):
            if reset[b, t]:
                seen = []
            if hold[b, t]:
                ys.append(torch.zeros(D, dtype=x.dtype))
                continue
            seen.append(x[b, t])
            ys.append(
                conv.bias + sum(weight[:, K - 1 - j] * s for j, s in enumerate(seen[: -K - 1 : -1]))
            )
        padded = [torch.zeros(D, dtype=x.dtype)] * conv.past + seen
        windows.append(torch.stack(padded[len(padded) - conv.past :]))
    return torch.stack(ys).view(*x.shape), torch.stack(windows)


def masks(kind):
    reset, hold = torch.rand(B, T) < 0.25, torch.rand(B, T) < 0.3
    nothing = torch.zeros(B, T, dtype=torch.bool)
    return {
        "plain": (Boundaries(), nothing, nothing),
        "reset": (Boundaries(reset), reset, nothing),
        "hold": (Boundaries(hold=hold), nothing, hold),
        "both": (Boundaries(reset, hold), reset, hold),
        "all padding": (Boundaries(hold=~nothing), nothing, ~nothing),
    }[kind]


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "reset", "hold", "both", "all padding"])
def test_is_its_definition(kind, kernel_size, continued):
    conv = CausalConv1d(D, kernel_size).double()
    boundaries, reset, hold = masks(kind)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    window = torch.randn(B, kernel_size - 1, D, dtype=torch.float64) if continued else None
    results = conv(x, window, boundaries), one_by_one(conv, x, reset, hold, window)
    weights = [torch.randn_like(r) for r in results[1]]
    sides = []
    for y, after in results:
        nothing = 0 * x.sum()  # gives a graph even if everything is padding
        y, after = y.masked_fill(hold[..., None], 0) + nothing, after + nothing
        sources = [x, *conv.parameters()]
        grads = torch.autograd.grad([y, after], sources, weights, materialize_grads=True)
        sides.append([y, after, *grads])
    for name, got, want in zip(("y", "window", "dx", "dweight", "dbias"), *sides, strict=True):
        assert_close(name, got, want, SAME * (8 if name.startswith("d") else 1))


def test_offsets_are_resets():
    """Includes an empty document at the beginning, between others and at the end."""
    conv, x = CausalConv1d(D).double(), torch.randn(1, T, D, dtype=torch.float64)
    reset = torch.zeros(1, T, dtype=torch.bool)
    reset[0, [0, 3, 4]] = True
    for offsets in ([0, 3, 4, T], [0, 0, 3, 3, 4, T]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        got = conv(x, None, Boundaries(cu_seqlens=cu_seqlens))
        for g, want in zip(got, conv(x, None, Boundaries(reset)), strict=True):
            assert torch.equal(g, want)
    last_is_empty = Boundaries(cu_seqlens=torch.tensor([0, 4, T, T], dtype=torch.int32))
    assert not conv(x, None, last_is_empty)[1].any()


OFFSETS = ([0, 3, 4, T], [0, 0, 3, 3, 4, T], [0, 4, T, T], [0, T])


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("kind", ["plain", "reset", *OFFSETS], ids=str)
def test_what_the_kernel_is_asked_for(kind, continued):
    """Boundaries become its reset, and a window is kept; with the kernel's reference it gives
    torch's values."""
    conv = CausalConv1d(D).double()
    packed = not isinstance(kind, str)
    x = torch.randn(1 if packed else B, T, D, dtype=torch.float64)
    if packed:
        boundaries = Boundaries(cu_seqlens=torch.tensor(kind, dtype=torch.int32))
    else:
        boundaries = masks(kind)[0]
    window = None
    if continued and not packed:
        window = torch.randn(len(x), 3, D, dtype=torch.float64)
    for silu in (False, True):
        got = conv._run_kernel(x, window, boundaries, silu, "reference")
        y, after = conv._run_torch(x, window, boundaries)
        assert_close("y", got[0], torch.nn.functional.silu(y) if silu else y, 2 * SAME)
        assert torch.equal(got[1], after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_once(dtype):
    conv, x = CausalConv1d(64).to(dtype), torch.randn(2, 50, 64, dtype=dtype)
    exact = conv.double()(x.double())[0]
    conv.to(dtype)
    for boundaries in (Boundaries(), Boundaries(hold=torch.zeros(2, 50, dtype=torch.bool))):
        y, window = conv(x, None, boundaries)
        assert y.dtype == window.dtype == dtype
        # half a unit at most; cuDNN adds the bias to a rounded sum
        assert_close("y", y, exact, EPS[dtype] / (2 if DEVICE == "cpu" else 1))
