"""Tests tfla's linear_step with weights of 8 bits and scales."""

import pytest
import torch
from torch.nn.functional import silu

from cases import DEVICE
from ops.tfla.test_linear import DTYPES, make, normal, normed

pytestmark = pytest.mark.usefixtures("poisoned")
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def eight_bits(eight, n, K):
    """Returns a matrix of 8 bits, of all values that there are, the scales of its rows, and their
    product."""
    bits = torch.randint(256, (n, K), dtype=torch.uint8)
    bits.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: bits.numel()]
    if eight.is_floating_point:
        bits[bits & 0x7F == 0x7F] = 0x7E  # NaN becomes the largest value
    weight = bits.view(eight)
    scale = torch.rand(n) / ((300 if eight.is_floating_point else 100) * (K + 1) ** 0.5)
    return weight, scale, weight.double() * scale.double()[:, None]


@pytest.mark.parametrize("K", [16, 48, 1104, 4096])
@pytest.mark.parametrize("B", [1, 3, 9, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eight", EIGHT_BITS, ids=str)
def test_eight_bits(tfla, eight, dtype, B, K):
    """Two matrices of 8 bits beside one of x's dtype, with a norm; the sum; and the gate."""
    x, (gates,) = make(dtype, B, K, [5])
    (first, s, one), (second, t, two) = (eight_bits(eight, n, K) for n in (40, 40))
    norm, bias, residual = (normal(*size, dtype=dtype) for size in ((K,), (5,), (B, 40)))
    options = {"norm_weight": norm, "norm_eps": 0.1}
    got = tfla.linear_step(
        x, [first, second, gates], [bias], scales=[s, t], capped=1, cap=3.0, **options
    )
    y = normed(x.double(), norm.double(), 0.1)
    bound = lambda z: 3 * torch.tanh(z / 3)
    want = [y @ one.mT, y @ two.mT, bound(y @ gates.double().mT + bias)]
    got += tfla.linear_step(x, [first], scales=[s], residual=residual)
    want += [x.double() @ one.mT + residual]
    got += tfla.linear_step(x, [first, second], scales=[s, t], gated=True, **options)
    want += [silu(y @ one.mT) * (y @ two.mT)]
    # fp32 sums of 8 bits, and x times the norm's weight rounded on a GPU
    eps = max(torch.finfo(dtype).eps, 2.0**-50) * (8 if dtype.itemsize > 2 else 1.5)
    for i, (z, exact) in enumerate(zip(got, want, strict=True)):
        error = (z.double() - exact).pow(2).mean().sqrt()
        assert error <= eps * exact.pow(2).mean().sqrt(), (i, error)


def test_eight_bits_that_do_not_fit_are_refused(tfla):
    x, (w,) = make(DTYPES[0], 2, 32, [8])
    bits, s, _ = eight_bits(torch.int8, 8, 32)
    fp8 = bits.to(torch.float8_e4m3fn)
    for weights, scales, says in (
        ([w], [s], r"weights\[0\] has dtype \S+, but must be int8 or float8_e4m3fn where scales"),
        ([bits], [], r"weights\[0\] has dtype torch.int8, but must be"),
        (
            [bits, fp8],
            [s, s],
            r"weights\[1\] has dtype torch.float8_e4m3fn, but must be torch.int8",
        ),
        ([bits], [s[:7]], r"scales\[0\] has shape \[7\], but must be \[N\] = \[8\]"),
        ([bits], [s.double()], r"scales\[0\] has dtype torch.float64, but must be torch.float32"),
        ([bits], [s, s], "scales are 2, but must be at most one for each weight"),
        ([bits], s, "scales is a Tensor, but must be a list of tensors"),
        ([bits[:, :24]], [s], r"weights\[0\] has shape \[8, 24\], but must be \[N, K\]"),
        ([bits.mT.contiguous().mT], [s], r"weights\[0\] has strides"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            tfla.linear_step(x, weights, scales=scales)
    with pytest.raises(ValueError, match="scales are 1, but must be 2 or none where gated"):
        tfla.linear_step(x, [bits, w], scales=[s], gated=True)


def test_op_is_registered_fully(tfla):
    """Schema and fake."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    x = torch.randn(3, 32, device=DEVICE, dtype=dtype)
    weights = [torch.randn(rows, 32, device=DEVICE, dtype=dtype) for rows in (16, 24, 5)]
    weights[:2] = [(w * 20).round().to(torch.int8) for w in weights[:2]]
    scales = [torch.rand(len(w), device=DEVICE) for w in weights[:2]]
    given = x, weights, scales, [], 1, 15.0, None, 1e-6, None, False
    op = tfla.dispatch.ops.linear_step.default
    torch.library.opcheck(op, given, test_utils=["test_schema", "test_faketensor"])
