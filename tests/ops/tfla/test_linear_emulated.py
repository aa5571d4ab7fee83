"""Tests tfla's CUDA kernels between two steps, linear_step, norm_step and gate_step, without a GPU."""

import pytest
import torch

from cases import upcast
from flashcell.kernels import tfla as reference
from numerics import EPS, assert_bitwise, assert_close
from ops.tfla.test_emulated import ORDERS, no_float64, order, pytestmark, tfla  # noqa: F401

LINEAR = ["x", "weights", "scales", "biases", "capped", "cap", "norm_weight", "norm_eps"]
LINEAR += ["residual", "gated"]
LINEARS = [(1, 8, [24]), (3, 40, [24, 17]), (8, 1096, [40]), (16, 2056, [48]), (17, 256, [33])]
LINEARS += [(40, 200, [20]), (2, 0, [24])]
# No whole piece of 8 or 4 bits, or more than one for each of 8 warps.
EIGHT_BITS = [
    (1, 16, [24]),
    (3, 48, [24, 17]),
    (8, 1104, [40]),
    (17, 2320, [33]),
    (2, 0, [24]),
]
# One row of x is multiplied as integers, unless it does not fit in shared memory.
INT4 = [
    (1, 64, [24]),
    (1, 1088, [40, 17]),
    (1, 36864, [40]),
    (3, 192, [24, 17]),
    (8, 1088, [40]),
    (17, 2368, [33]),
    (2, 0, [24]),
]

# Three SMs, so that a thread block takes several tiles, and 16 rows of x one pass, with the shared
# memory of an H200 and of sm_86 and sm_120; and more SMs than tiles, so that 9 rows take two passes.
MACHINES = ["processors=3 shared=227", "processors=3 shared=99", "processors=40 shared=227"]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K", "rows"), LINEARS)
def test_linear_step(tfla, order, dtype, B, K, rows, machine):  # noqa: F811
    """Tests several matrices, bounded ones, the norm, the sum and the gate."""
    draw = lambda n: (torch.randn(n, K) / (K + 1) ** 0.5).to(dtype)
    check_linear_step(tfla, order, dtype, B, K, rows, machine, draw, lambda n: None)


def check_linear_step(tfla, order, dtype, B, K, rows, machine, draw, scale_of):  # noqa: F811
    op = tfla.dispatch.ops.linear_step
    x, norm = torch.randn(B, K).to(dtype), torch.randn(K).to(dtype)
    plain, scales = [draw(n) for n in rows], [scale_of(n) for n in rows]
    scales = [] if scales[0] is None else scales
    gates = [(torch.randn(n, K) / (K + 1) ** 0.5).to(dtype) for n in (8, 3)]
    biases = [torch.randn(n).to(dtype) for n in (8, 3)]
    residual = torch.randn(B, rows[0]).to(dtype)
    twice = [s.flip(0) for s in scales[:1]] + scales[:1]
    bits = plain[0].view(torch.uint8) if scales else plain[0]
    pair = [plain[0], bits.flip(0).view(plain[0].dtype)]
    calls = [
        (x, plain + gates, scales, biases, 2, 3.0, None, 0.1, None, False),
        (x, plain + gates, scales, biases, 2, 3.0, norm, 0.1, None, False),
        (x, plain[:1], scales[:1], [], 0, 0.0, norm, 0.1, residual, False),
        (x, pair, twice, [], 0, 0.0, norm, 0.1, None, True),
    ]
    for call in calls:
        results = []
        for words in ORDERS[:2]:
            order(f"{words} {machine}")
            results.append(op(*call))
        for one, other in zip(*results, strict=True):
            assert_bitwise("the other order", other, one)
        arguments = dict(zip(LINEAR, call, strict=True))
        wide = upcast(arguments)
        wide["weights"] = [w.double() for w in arguments["weights"]]
        wide.pop("scales")
        for at, (w, s) in enumerate(zip(call[1], call[2], strict=False)):
            if w.dtype == torch.uint8:
                wide["weights"][at] = reference.int4.unpack_int4(w, s).double()
            else:
                wide["weights"][at] *= s.double()[:, None]
        wide["biases"] = [b.double() for b in arguments["biases"]]
        want = reference.linear_step(**wide)
        count = len(want) - call[4]
        got = [*results[0][0].split([w.shape[1] for w in want[:count]], 1)]
        got += results[0][1].split([w.shape[1] for w in want[count:]], 1) if call[4] else []
        for y, exact in zip(got, want, strict=True):
            assert_close("linear_step", y, exact, 1.5 * EPS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K"), [(1, 8), (5, 1096), (2, 8200)])
def test_between_products(tfla, order, dtype, B, K):  # noqa: F811
    """norm_step with gates, and gate_step of two halves of one tensor."""
    ops = tfla.dispatch.ops
    x, scale, bias = (torch.randn(*shape).to(dtype) for shape in ((B, K), (K,), (19,)))
    weights = [(torch.randn(n, K) * K**-0.5).to(dtype) for n in (8, 19)]
    results = []
    for words in ORDERS[:2]:
        order(words)
        results.append([*ops.norm_step(x, scale, 0.1, weights, [bias], 3.0), ops.gate_step(x, x)])
    for one, other in zip(*results, strict=True):
        assert_bitwise("the other order", other, one)
    y, bounded, _ = results[0]
    want = reference.norm_step(x.double(), scale.double(), 0.1)[0]
    assert_close("norm", y, want, 1.5 * EPS[dtype])
    wide = [w.double() for w in weights]
    gates = reference.linear_step(y.double(), wide, [bias.double()], capped=2, cap=3.0)
    assert_close("gates", bounded, torch.cat(gates, 1), 16 * EPS[torch.float32])
    halves = torch.randn(B, 2 * K).to(dtype).chunk(2, -1)
    want = reference.gate_step(*(h.double() for h in halves))
    assert_close("gate", ops.gate_step(*halves), want, 1.5 * EPS[dtype])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("B", "K", "rows"), EIGHT_BITS)
def test_eight_bits(tfla, order, eight, dtype, B, K, rows, machine):  # noqa: F811
    """The same with weights of 8 bits, and gates of 16 beside them. All values of 8 bits occur if
    there are as many; they are exact."""

    def draw(n):
        bits = torch.randint(256, (n, K), dtype=torch.uint8)
        bits.view(-1)[:256] = torch.arange(256)[: bits.numel()]
        if eight.is_floating_point:
            bits[bits & 0x7F == 0x7F] = 0x7E  # no NaN
        return bits.view(eight)

    scale = lambda n: torch.rand(n) / (300 if eight.is_floating_point else 100) / (K + 1) ** 0.5
    check_linear_step(tfla, order, dtype, B, K, rows, machine, draw, scale)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K", "rows"), INT4)
def test_int4(tfla, order, dtype, B, K, rows, machine):  # noqa: F811
    """The same with weights of 4 bits, which are rounded to x's dtype after their scale."""

    def draw(n):
        bits = torch.randint(256, (n, K // 2), dtype=torch.uint8)
        bits.view(-1)[:256] = torch.arange(256)[: bits.numel()]
        return bits

    scale = lambda n: (torch.randn(n, K // 32) / (4 * (K + 1) ** 0.5)).bfloat16()
    check_linear_step(tfla, order, dtype, B, K, rows, machine, draw, scale)
