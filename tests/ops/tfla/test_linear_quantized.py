"""Tests tfla's linear_step with weights of 8 and 4 bits and scales."""

import pytest
import torch
from torch.nn.functional import silu

from cases import DEVICE
from numerics import EPS, assert_as_accurate, assert_close
from ops.tfla.test_linear import DTYPES, make, normal, normed

pytestmark = pytest.mark.usefixtures("poisoned")
# The dtype of weights, and their widths: on a GPU kernels take int4 at multiples of 64.
FORMATS = [(dtype, K) for dtype in (torch.int8, torch.float8_e4m3fn) for K in (16, 48, 1104, 4096)]
FORMATS += [(torch.uint8, K) for K in (32, 64, 192, 1120, 1088, 4096)]


def quantized(kept, n, K):
    """Returns a matrix of all bits that there are, its scales, and its values in fp64."""
    bits = torch.randint(256, (n, K // 2 if kept == torch.uint8 else K), dtype=torch.uint8)
    bits.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: bits.numel()]
    if kept == torch.uint8:
        scale = (torch.randn(n, K // 32) / (4 * (K + 1) ** 0.5)).bfloat16()
        return bits, scale, int4_values(bits, scale)
    if kept.is_floating_point:
        bits[bits & 0x7F == 0x7F] = 0x7E  # NaN becomes the largest value
    weight = bits.view(kept)
    scale = torch.rand(n) / ((300 if kept.is_floating_point else 100) * (K + 1) ** 0.5)
    return weight, scale, weight.double() * scale.double()[:, None]


def int4_values(bits, scale):
    """Reads a matrix of 4 bits, one weight of all groups after the other."""
    values = torch.empty(len(bits), 2 * bits.shape[1], dtype=torch.double)
    for i in range(32):
        byte = bits[:, i % 16 :: 16].int()
        values[:, i::32] = ((byte >> 4 if i >= 16 else byte & 15) - 8) * scale.double()
    return values


def test_int4_is_packed_and_unpacked(tfla):
    bits, scale, values = quantized(torch.uint8, 16, 96)
    assert torch.equal(tfla.int4.unpack_int4(bits, scale).double().cpu(), values.cpu())
    integers = (values / scale.double().repeat_interleave(32, 1)).round()
    assert torch.equal(tfla.int4.pack_int4(integers.view(16, 3, 32)), bits)


@pytest.mark.parametrize("B", [1, 3, 9, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kept", "K"), FORMATS, ids=str)
def test_quantized(tfla, kept, K, dtype, B):
    """Two quantised matrices beside one of x's dtype, with a norm; the sum; and the gate."""
    x, (gates,) = make(dtype, B, K, [5])
    (first, s, one), (second, t, two) = (quantized(kept, n, K) for n in (40, 40))
    norm, bias, residual = (normal(*size, dtype=dtype) for size in ((K,), (5,), (B, 40)))
    options = {"norm_weight": norm, "norm_eps": 0.1}
    got = tfla.linear_step(
        x, [first, second, gates], [bias], scales=[s, t], capped=1, cap=3.0, **options
    )
    got += tfla.linear_step(x, [first], scales=[s], residual=residual)
    got += tfla.linear_step(x, [first, second], scales=[s, t], gated=True, **options)

    def compute(x, norm, one, two, gates, bias, residual):
        y = normed(x, norm, 0.1)
        bounded = 3 * torch.tanh((y @ gates.mT + bias) / 3)
        up, down = y @ one.mT, y @ two.mT
        return [up, down, bounded, x @ one.mT + residual, silu(up) * down]

    tensors = x, norm, one, two, gates, bias, residual
    wide = torch.promote_types(dtype, torch.float32)
    exact, peer = (compute(*(t.to(kind) for t in tensors)) for kind in (torch.float64, wide))
    for number, (z, one, other) in enumerate(zip(got, exact, peer, strict=True)):
        if dtype.itemsize > 2:  # sums of exact weights
            assert_as_accurate(str(number), z, one, other, K)
        else:  # on a GPU x times the norm's weight is rounded
            assert_close(str(number), z, one, 1.5 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_tiny_linear(tfla, kept, dtype):
    """Runs every kernel for a format, for scripts/check_cuda."""
    bits, scale, _ = quantized(kept, 24, 192)
    norm = normal(192, dtype=dtype)
    for B in (1, 3, 9):
        x, residual = normal(B, 192, dtype=dtype), normal(B, 24, dtype=dtype)
        found = [
            *tfla.linear_step(x, [bits], scales=[scale], residual=residual),
            *tfla.linear_step(x, [bits], scales=[scale], norm_weight=norm),
            *tfla.linear_step(x, [bits, bits], scales=[scale, scale], gated=True),
        ]
        assert all(y.isfinite().all() for y in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kept", "K"), [(torch.int8, 1104), (torch.uint8, 1088)], ids=str)
def test_values_of_many_sizes(tfla, kept, K, dtype):
    """Rows of x whose elements differ by a million, a tiny row, one of zeros, and two that are not finite,
    which spoil no other."""
    weight, scale, values = quantized(kept, 40, K)
    x = torch.randn(2, K) * 2.0 ** torch.randint(-20, 1, (2, K))
    x[1] *= 1e-3 if dtype == torch.float16 else 1e-20
    for row in (x, x.flip(0), x[:1], x[1:], torch.zeros(1, K)):
        row = row.to(dtype)
        (y,) = tfla.linear_step(row, [weight], scales=[scale])
        exact = row.double() @ values.mT
        eps = EPS[torch.float32] if dtype.itemsize > 2 else EPS[dtype]
        terms = row.double().abs().amax(1, keepdim=True) * values.abs().sum(1)
        bound = eps * exact.abs() + 2.0**-21 * terms + torch.finfo(dtype).tiny
        assert torch.all((y.double() - exact).abs() <= bound)
    for bad in (torch.inf, -torch.inf, torch.nan):
        both = x.to(dtype)
        both[0, 5] = bad
        (y,) = tfla.linear_step(both, [weight], scales=[scale])
        (alone,) = tfla.linear_step(both[1:], [weight], scales=[scale])
        assert not y[0].isfinite().any()
        assert_close("the other row", y[1:], alone.double(), 2 * EPS[dtype])


def test_what_does_not_fit_is_refused(tfla):
    x, (w,) = make(DTYPES[0], 2, 32, [8])
    bits, s, _ = quantized(torch.int8, 8, 32)
    fp8 = bits.to(torch.float8_e4m3fn)
    packed, two, _ = quantized(torch.uint8, 8, 32)
    for weights, scales, says in (
        ([w], [s], r"weights\[0\] has dtype \S+, but must be int8, float8_e4m3fn or uint8 where"),
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
        ([packed, packed], [two, two.repeat(1, 2)[:, ::2]], r"scales\[1\] has strides"),
        (
            [packed],
            [two.float()],
            r"scales\[0\] has dtype torch.float32, but must be torch.bfloat16",
        ),
        (
            [packed],
            [two[:, :0]],
            r"scales\[0\] has shape \[8, 0\], but must be \[N, K / 32\] = \[8, 1\]",
        ),
        (
            [bits.view(torch.uint8)],
            [two],
            r"weights\[0\] has shape \[8, 32\], but must be \[N, K / 2\]",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            tfla.linear_step(x, weights, scales=scales)
    with pytest.raises(ValueError, match="scales are 1, but must be 2 or none where gated"):
        tfla.linear_step(x, [bits, w], scales=[s], gated=True)
    with pytest.raises(
        ValueError, match=r"x has shape \[2, 40\], but needs K a multiple of 32 for 4"
    ):
        tfla.linear_step(normal(2, 40, dtype=DTYPES[0]), [packed], scales=[two])


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
