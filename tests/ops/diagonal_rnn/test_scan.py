"""Tests diagonal-rnn's scans: values and gradients against the float64 reference, and their errors."""

import pytest
import torch

from cases import DEVICE
from flashcell.kernels import diagonal_rnn as reference
from numerics import assert_as_accurate, assert_bitwise

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cuda":
    DTYPES.remove(torch.float64)
SHAPES = [(3, 7, 5), (1, 1, 1), (2, 33, 130), (4, 12, 600), (1, 100, 17)]
BLOCKS = [None, 1, 2, 3, 4]
pytestmark = pytest.mark.usefixtures("poisoned")
short = lambda dtype: str(dtype)[6:]


def draw(shape, n, dtype, initial=True):
    """Draws a, b, h0; a contracts, so that a long scan stays of the size of b."""
    B, T, D = shape
    block = () if n is None else (n,)
    a = torch.rand(B, T, D, *block, *block) * (2 / (n or 1)) - 1 / (n or 1)
    h0 = torch.randn(B, D, *block) if initial else None
    return [a.to(dtype), torch.randn(B, T, D, *block).to(dtype), h0]


def run(module, given, dh, reverse):
    given = [None if t is None else t.detach().requires_grad_() for t in given]
    scan = module.linear_scan if given[0].dim() == given[1].dim() else module.block_scan
    h = scan(*given, reverse=reverse)
    tensors = [t for t in given if t is not None]
    grads = torch.autograd.grad(h, tensors, dh.to(h.dtype), materialize_grads=True)
    return dict(zip(("h", "da", "db", "dh0"), (h.detach(), *grads), strict=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(diagonal_rnn, shape, n, reverse, dtype):
    given = draw(shape, n, dtype, initial=shape[0] > 1)
    dh = torch.randn(given[1].shape).to(dtype)
    got = run(diagonal_rnn, given, dh, reverse)
    peer = run(reference, given, dh, reverse)
    exact = run(reference, [None if t is None else t.double() for t in given], dh, reverse)
    for key in exact:
        assert_as_accurate(key, got[key], exact[key], peer[key], n or 1)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("n", [None, 2])
def test_empty_sizes(diagonal_rnn, shape, n):
    given = draw(shape, n, torch.float32)
    dh = torch.randn(given[1].shape)
    got, want = (run(module, given, dh, False) for module in (diagonal_rnn, reference))
    for key in want:
        assert_bitwise(key, got[key], want[key])


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's threads")
def test_independent_of_threads(diagonal_rnn):
    threads, results = torch.get_num_threads(), []
    given = draw((3, 200, 300), 2, torch.float32)
    dh = torch.randn(given[1].shape)
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(run(diagonal_rnn, given, dh, False))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for key, value in other.items():
            assert_bitwise(key, value, results[0][key])


def test_strided_and_mixed_dtypes(diagonal_rnn):
    a, b, h0 = draw((2, 9, 24), None, torch.float32)
    want = diagonal_rnn.linear_scan(a, b, h0)
    wide = torch.stack([b, b], -1)
    assert_bitwise("b strided", diagonal_rnn.linear_scan(a, wide[..., 0], h0), want)
    h = diagonal_rnn.linear_scan(a, b.bfloat16(), h0)
    exact = reference.linear_scan(a.double(), b.bfloat16().double(), h0.double())
    assert h.dtype == torch.bfloat16
    assert_bitwise("a wider than b", h, exact.to(torch.bfloat16))


def test_one_direction_is_the_other_of_the_flipped(diagonal_rnn):
    a, b, h0 = draw((2, 9, 24), 3, torch.float32)
    flipped = diagonal_rnn.block_scan(a.flip(1), b.flip(1), h0).flip(1)
    assert_bitwise("h", diagonal_rnn.block_scan(a, b, h0, reverse=True), flipped)


@pytest.mark.parametrize("entry", ["kernel", "reference"])
def test_bad_input(request, entry):
    module = request.getfixturevalue("diagonal_rnn") if entry == "kernel" else reference
    a, b, h0 = draw((2, 3, 4), None, torch.float32)
    for error, message, arguments in (
        (
            ValueError,
            r"a has shape \[2, 3\], but must be \[B, T, D\] = \[2, 3, 4\]",
            (a[..., 0], b),
        ),
        (ValueError, r"b has shape \[3, 4\], but must be \[B, T, D\]", (a, b[0])),
        (TypeError, "b has dtype torch.int64", (a, b.long())),
        (TypeError, "a is a float, but must be a tensor", (0.5, b)),
        (ValueError, r"h0 has shape \[1, 4\], but must be b without T = \[2, 4\]", (a, b, h0[:1])),
        (ValueError, "a is on meta", (a.to("meta"), b)),
    ):
        with pytest.raises(error, match=message):
            module.linear_scan(*arguments)
    with pytest.raises(TypeError, match="reverse is a str, but must be True or False"):
        module.linear_scan(a, b, reverse="no")
    a, b, _ = draw((2, 3, 4), 3, torch.float32)
    with pytest.raises(ValueError, match=r"a has shape .* must be \[B, T, D, n, n\]"):
        module.block_scan(b, b)
    with pytest.raises(ValueError, match=r"b has blocks of 5, but n must be in 1\.\.4"):
        module.block_scan(torch.randn(2, 3, 4, 5, 5), torch.randn(2, 3, 4, 5))
