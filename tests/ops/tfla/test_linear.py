"""Tests tfla's linear_step: the layers of a decoded token that read the same x."""

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from cases import DEVICE
from numerics import assert_as_accurate, assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.bfloat16, torch.float16]
if DEVICE == "cpu":
    DTYPES += [torch.float32, torch.float64]
# Rows of x: a tile of the matrix instruction is 8, a pass over W 16.
ROWS = [1, 3, 8, 9, 16, 17, 40]
DEPTHS = [8, 40, 256, 1096, 4096]  # K: no full piece, an incomplete last one, several for each warp


def normal(*shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype)


def make(dtype, B, K, rows):
    x = normal(B, K, dtype=dtype)
    return x, [normal(n, K, dtype=dtype, scale=K**-0.5) for n in rows]


def normed(x, weight, eps):
    return x if weight is None else rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def check(name, got, compute, tensors):
    """Compares with float64, allowing twice the error of fp32 with one rounding."""
    exact = compute(*(t.double() for t in tensors))
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    peer = compute(*(t.to(wide) for t in tensors)).to(got.dtype)
    terms = tensors[0].shape[1] if wide == torch.float64 else 1  # in fp32 the peer rounds as often
    assert_as_accurate(name, got, exact, peer, terms, on_cuda=(tensors[0].dtype, False))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("K", DEPTHS)
@pytest.mark.parametrize("B", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_matrices(tfla, dtype, B, K, norm):
    """Widths that fill no tile; two outputs in the io dtype, two in fp32 with a bias and a bound."""
    x, weights = make(dtype, B, K, [24, 17, 8, 3])
    biases = [normal(n, dtype=dtype) for n in (8, 3)]
    scale = normal(K, dtype=dtype) if norm else None
    outputs = tfla.linear_step(
        x, weights, biases, capped=2, cap=3.0, norm_weight=scale, norm_eps=0.1
    )
    wide = torch.promote_types(dtype, torch.float32)
    assert [y.dtype for y in outputs] == [dtype, dtype, wide, wide]
    for i, (y, w) in enumerate(zip(outputs, weights, strict=True)):
        bias = [biases[i - 2]] if i > 1 else []
        tensors = [x, w, *bias, *([scale] if norm else [])]

        def compute(x, w, *rest, bias=bias):
            y = normed(x, rest[-1] if norm else None, 0.1) @ w.mT
            return 3 * torch.tanh((y + rest[0]) / 3) if bias else y

        rounded = y.to(dtype) if bias and norm else y  # x times the norm's weight is rounded
        check(f"output {i}", rounded, compute, tensors)


@pytest.mark.parametrize("B", [1, 9, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_and_gate(tfla, dtype, B):
    x, (up, gate) = make(dtype, B, 512, [44, 44])
    residual, scale = normal(B, 44, dtype=dtype), normal(512, dtype=dtype)
    (y,) = tfla.linear_step(x, [up], residual=residual)
    check("sum", y, lambda x, w, r: r + x @ w.mT, [x, up, residual])
    (y,) = tfla.linear_step(x, [gate, up], gated=True, norm_weight=scale)

    def gated(x, gate, up, scale):
        x = normed(x, scale, 1e-6)
        return silu(x @ gate.mT) * (x @ up.mT)

    check("gate", y, gated, [x, gate, up, scale])


@pytest.mark.parametrize("K", [8, 1096, 8200])
@pytest.mark.parametrize("B", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_gates(tfla, dtype, B, K):
    x, weights = make(dtype, B, K, [8, 17])
    scale, bias = normal(K, dtype=dtype), normal(17, dtype=dtype)
    y, first, second = tfla.norm_step(x, scale, 0.1, weights, [bias], cap=3.0)
    check("norm", y, lambda x, w: normed(x, w, 0.1), [x, scale])
    bound = lambda y: 3 * torch.tanh(y / 3)
    atol = max(2e-6, 2.0**-24 * K**0.5)  # K terms of size one, rounded one by one
    for got, tensors in ((first, [y, weights[0]]), (second, [y, weights[1], bias])):
        want = bound(tensors[0].double() @ tensors[1].double().mT + (tensors[2:] or [0])[0])
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=atol)
    assert_bitwise("alone", tfla.norm_step(x, scale, 0.1)[0], y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_48_kb(tfla, dtype):
    """Needs all the shared memory that a kernel has without opting in, less its static arrays."""
    x, scale = normal(2, 24_576, dtype=dtype), normal(24_576, dtype=dtype)
    y = tfla.norm_step(x, scale, 0.1)[0]
    check("norm", y, lambda x, w: normed(x, w, 0.1), [x, scale])


@pytest.mark.skipif(DEVICE != "cuda", reason="the reference takes any width")
def test_a_row_that_shared_memory_cannot_hold(tfla):
    x = torch.ones(1, 2**17, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x has rows of 131072, but norm_step takes at most"):
        tfla.norm_step(x, x[0])
    assert tfla.norm_step(x[:, :64], x[0, :64])[0].shape == (1, 64), "the error is over"


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_depth(tfla, dtype, norm):
    """Sums of nothing are 0, also with a norm, whose mean would divide by 0."""
    x, weights, bias = (
        torch.ones(3, 0, dtype=dtype),
        torch.ones(24, 0, dtype=dtype),
        normal(24, dtype=dtype),
    )
    scale = x[0] if norm else None
    plain, biased = tfla.linear_step(x, [weights] * 2, [bias], norm_weight=scale)
    assert_bitwise("plain", plain, torch.zeros_like(plain))
    assert_bitwise("biased", biased, bias.expand(3, -1))
    y, gate = tfla.norm_step(x, x[0], 1e-6, [weights], [bias])
    assert y.shape == (3, 0)
    wide = torch.promote_types(dtype, torch.float32)
    assert_bitwise("gate", gate, bias.to(wide).expand(3, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_of_halves(tfla, dtype):
    """Gate and up are two halves of one output, as a packed product leaves them."""
    gate, up = normal(5, 2 * 136, dtype=dtype).chunk(2, -1)
    check("gate", tfla.gate_step(gate, up), lambda g, u: silu(g) * u, [gate, up])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_see_each_other(tfla, dtype):
    """Results do not depend on other rows, nor on their number: bitwise, also if others are not
    finite."""
    x, (weight,) = make(dtype, 16, 1096, [40])
    scale = normal(1096, dtype=dtype)
    want = tfla.linear_step(x[:1], [weight], norm_weight=scale)[0]
    for B in (8, 9, 16):
        rows = x[:B].clone()
        rows[1:] = float("nan")
        assert_bitwise(
            f"{B} rows", tfla.linear_step(rows, [weight], norm_weight=scale)[0][:1], want
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="threads are the CPU's")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 5])
def test_threads_do_not_change_a_bit(tfla, dtype, B):
    x, weights = make(dtype, B, 520, [256, 3, 77])
    before, outputs = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(torch.cat(tfla.linear_step(x, weights, norm_weight=weights[1][0]), 1))
    torch.set_num_threads(before)
    assert_bitwise("2 threads", outputs[1], outputs[0])
    assert_bitwise("3 threads", outputs[2], outputs[0])


@pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA: test_compiles_and_replays")
def test_op_is_registered_fully(tfla):
    """Schema and fake, and one compiled graph."""
    x, weights = make(torch.float32, 2, 256, [40, 8])
    op = tfla.linear.ops.linear_step
    bias = weights[1][:, 0].contiguous()
    given = (x, weights, [], [bias], 1, 3.0, weights[0][0], 1e-6, None, False)
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(op.default, given, test_utils=checks)
    work = lambda x: torch.cat(tfla.linear_step(x, weights, capped=1), 1)
    assert_bitwise("y", torch.compile(work, fullgraph=True, backend="aot_eager")(x), work(x))


def test_rows_at_any_address(tfla):
    x, (weight,) = make(torch.bfloat16, 3, 256, [40])
    wide = torch.zeros(3, 257, dtype=x.dtype)
    wide[:, 1:] = x
    assert_bitwise(
        "y", tfla.linear_step(wide[:, 1:], [weight])[0], tfla.linear_step(x, [weight])[0]
    )
    assert tfla.linear_step(x[:0], [weight])[0].shape == (0, 40)


def test_fp32_is_torchs(tfla):
    x, (weight,) = make(torch.float32, 3, 256, [40])
    torch.testing.assert_close(tfla.linear_step(x, [weight])[0], x @ weight.mT)


def test_wrong_arguments_are_named(tfla):
    x, (w, v) = make(torch.bfloat16, 2, 64, [8, 8])
    wrong = {
        r"x has shape \[2, 60\]": ((x[:, :60], [w]), {}),
        r"weights are 9, but must be 1 to 8": ((x, [w] * 9), {}),
        r"weights\[1\] has dtype torch.float32": ((x, [w, v.float()]), {}),
        r"weights\[0\] has shape \[8, 56\]": ((x, [w[:, :56]]), {}),
        r"weights\[0\] has shape \[\]": ((x, [w[0, 0]]), {}),
        r"weights\[1\] is a NoneType": ((x, [w, None]), {}),
        r"biases\[0\] has shape \[7\]": ((x, [w], [x[0, :7]]), {}),
        r"norm_weight has shape \[8\]": ((x, [w]), {"norm_weight": x[0, :8]}),
        r"capped is 2, but must be 0 to 1": ((x, [w]), {"capped": 2}),
        r"must be one where residual is given": ((x, [w, v]), {"residual": x[:, :8]}),
        r"capped is 1, but must be 0": ((x, [w]), {"residual": x[:, :8], "capped": 1}),
        r"gated is True, but needs two weights": ((x, [w]), {"gated": True}),
        r"weights\[1\] has shape \[7, 64\], but must be \[N, K\] of weights\[0\] = \[8, 64\]": (
            (x, [w, v[:7]]),
            {"gated": True},
        ),
        r"weights is a Tensor, but must be a list": ((x, w), {}),
        r"biases is a NoneType, but must be a list": ((x, [w], None), {}),
        r"cap is -1.0, but must be a number >= 0": ((x, [w]), {"capped": 1, "cap": -1.0}),
        r"norm_eps is a str, but must be a number": ((x, [w]), {"norm_eps": "1"}),
        r"linear_step is for decoding": ((x, [w.clone().requires_grad_()]), {}),
    }
    for message, (args, kwargs) in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            tfla.linear_step(*args, **kwargs)
    with pytest.raises(TypeError, match="norm_weight is a NoneType"):
        tfla.norm_step(x, None)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_compiles_and_replays(tfla):
    x, weights = make(torch.bfloat16, 2, 256, [40, 8])

    def work(x):
        return torch.cat([y.float() for y in tfla.linear_step(x, weights, capped=1)], 1)

    want = work(x)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    assert_bitwise("compiled", compiled(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work(x)
    for _ in range(3):
        graph.replay()
    assert_bitwise("replayed", got, want)
