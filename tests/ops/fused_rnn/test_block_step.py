"""Tests a decoding step of a whole residual block against its equations, for all sizes."""

import pytest
import torch

from cases import DEVICE
from flashcell.kernels import fused_rnn as reference
from numerics import EPS, assert_as_accurate, assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# B, heads, their width, width inside the SwiGLU: for one thread and two, partial vectors and tasks
SIZES = [(1, 1, 1, 1), (3, 2, 5, 7), (1, 2, 128, 512), (9, 1, 100, 200), (17, 3, 40, 130)]


def make(cell, size, dtype, nobias=False):
    (B, N, D, width), spec = size, reference.CELLS[cell]
    H, G = N * D, spec.gates
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape, terms=1):
        return (torch.randn(*shape, dtype=torch.float64) / terms**0.5).to(dtype)

    state = [torch.randn(B, N, D, dtype=wide) for _ in range(spec.states)]
    if cell == "slstm":
        state[2] = state[2].abs() + 0.5  # n > 0, except for one empty unit
        state[1][:1, :1, :1] = state[2][:1, :1, :1] = 0
    return {
        "x": normal(B, H), "mixer_norm": normal(H), "in_proj": normal(G * H, H, terms=H),
        "weight": normal(G, N, D, D, terms=D),
        "bias": None if nobias else normal(spec.bias_rows, N, D), "state": tuple(state),
        "mlp_norm": normal(H), "gate": normal(width, H, terms=H), "up": normal(width, H, terms=H),
        "down": normal(H, width, terms=width), "mixer_eps": 1e-6, "mlp_eps": 1e-5,
    }  # fmt: skip


def copied(call, dtype=None):
    """Returns new tensors, in `dtype` if given; states in the corresponding state dtype."""
    wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
    new = lambda t, to: t.clone() if to is None else t.to(to, copy=True)
    own = {k: new(v, dtype) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    return own | {"state": tuple(new(s, wide) for s in call["state"])}


def run(kernel, cell, call, **options):
    """Returns the output, and the states after it."""
    return kernel.block_step(cell, **call, **options), *call["state"]


@pytest.mark.parametrize("nobias", [False, True], ids=["bias", "plain"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", reference.CELLS)
def test_is_its_equations(fused_rnn, cell, dtype, size, nobias):
    call = make(cell, size, dtype, nobias)
    got = run(fused_rnn, cell, copied(call))
    exact = run(reference, cell, copied(call, torch.float64), backend="reference")
    peer = run(reference, cell, copied(call), backend="reference")
    terms = max(size[1] * size[2], size[3])
    for i, (y, want, other) in enumerate(zip(got, exact, peer, strict=True)):
        assert y.dtype == (call["x"] if i == 0 else call["state"][0]).dtype
        assert_as_accurate(f"result {i}", y, want, other, terms)


@pytest.mark.skipif(DEVICE != "cpu", reason="the op is the CPU's")
@pytest.mark.parametrize("cell", reference.CELLS)
def test_is_the_ops_that_it_stands_for(fused_rnn, cell):
    """Norm, projection, step, norm and SwiGLU, each run separately."""
    call = make(cell, (4, 2, 64, 96), torch.float32)
    y = torch.nn.functional.rms_norm(call["x"], (128,), call["mixer_norm"], call["mixer_eps"])
    u = fused_rnn.linear(y, call["in_proj"]).view(4, -1, 2, 64)
    h, state = fused_rnn.recurrent_step(cell, u, call["weight"], call["bias"], call["state"])
    mid = call["x"] + h.flatten(1)
    y = torch.nn.functional.rms_norm(mid, (128,), call["mlp_norm"], call["mlp_eps"])
    inner = torch.nn.functional.silu(y @ call["gate"].mT) * (y @ call["up"].mT)
    got = run(fused_rnn, cell, copied(call))
    for one, other in zip(got, (mid + inner @ call["down"].mT, *state), strict=True):
        error = (one - other).double().pow(2).mean().sqrt()
        assert error <= 8 * EPS[torch.float32] * other.double().pow(2).mean().sqrt()


@pytest.mark.skipif(DEVICE != "cpu", reason="the op is the CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", reference.CELLS)
def test_repeats_bit_for_bit(fused_rnn, cell, dtype):
    """Bitwise the same for any number of threads, and for a row whatever rows are beside it."""
    call, threads = make(cell, (11, 2, 72, 200), dtype), torch.get_num_threads()
    want = run(fused_rnn, cell, copied(call))
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            for _ in range(20):
                for got, first in zip(run(fused_rnn, cell, copied(call)), want, strict=True):
                    assert_bitwise(f"{count} threads", got, first)
    finally:
        torch.set_num_threads(threads)
    for rows in (slice(0, 1), slice(3, 8), slice(9, 11)):
        state = tuple(s[rows].clone() for s in call["state"])
        part = run(fused_rnn, cell, copied(call) | {"x": call["x"][rows], "state": state})
        for got, first in zip(part, want, strict=True):
            assert_bitwise(str(rows), got, first[rows])


def test_a_sequence_of_tokens(fused_rnn):
    """States are changed in place; rows of x may be strided; one row equals that row of many."""
    call = make("lstm", (2, 2, 8, 24), torch.float32)
    xs, states = torch.randn(2, 5, 32), call["state"]
    places = [s.data_ptr() for s in states]
    exact = copied(call, torch.float64)
    for t in range(5):
        x = xs[:, t, 16:]
        y = fused_rnn.block_step("lstm", **call | {"x": x})
        want = reference.block_step("lstm", **exact | {"x": x.double()}, backend="reference")
        assert_as_accurate("y", y, want, want.float(), 32)
        assert_as_accurate("c", states[1], exact["state"][1], exact["state"][1].float(), 32)
    assert [s.data_ptr() for s in states] == places


def test_no_rows(fused_rnn):
    assert fused_rnn.block_step("gru", **make("gru", (0, 2, 8, 24), torch.float32)).shape == (0, 16)
    nothing = make("gru", (2, 2, 8, 0), torch.float32)
    got, want = (run(k, "gru", copied(nothing)) for k in (fused_rnn, reference))
    torch.testing.assert_close(got, want)


CALL = make("gru", (2, 2, 4, 6), torch.float32)
BAD = [
    ({"cell": "mamba"}, ValueError, "cell is 'mamba', but must be one of"),
    ({"x": torch.ones(2, 3, 8)}, ValueError, r"x has shape \[2, 3, 8\], but must be \[B, H\]"),
    ({"x": torch.ones(2, 8).long()}, TypeError, "x has dtype torch.int64"),
    ({"weight": torch.ones(3, 2, 5, 5)}, ValueError, r"with N D = 8"),
    ({"in_proj": torch.ones(8, 8)}, ValueError, r"in_proj has shape \[8, 8\], but must be \[G H, H\]"),
    ({"bias": torch.ones(3, 2, 4)}, ValueError, r"bias has shape \[3, 2, 4\], but must be \[R, N, D\]"),
    ({"up": torch.ones(5, 8)}, ValueError, r"up has shape \[5, 8\], but must be \[I, H\] = \[6, 8\]"),
    ({"down": torch.ones(6, 8).mT}, ValueError, r"down has strides .*, but must be contiguous"),
    ({"gate": torch.ones(6, 8).double()}, TypeError, "gate has dtype torch.float64, but must be"),
    ({"mlp_norm": None}, TypeError, "mlp_norm is a NoneType, but must be a tensor"),
    ({"state": ()}, ValueError, "state is 0 tensors, but gru needs a tuple of 1 tensors"),
    ({"state": (torch.ones(2, 2, 4).half(),)}, TypeError, r"state\[0\] has dtype torch.float16"),
    ({"mixer_eps": -1.0}, ValueError, "mixer_eps is -1.0, but must be"),
    ({"backend": "tpu"}, ValueError, "backend is 'tpu', but must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD)
def test_bad_input(fused_rnn, change, error, text):
    with pytest.raises(error, match=text):
        fused_rnn.block_step(**{"cell": "gru", **CALL, **change})


def test_a_gradient_is_refused(fused_rnn):
    call = copied(CALL)
    call["down"].requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient"):
        fused_rnn.block_step("gru", **call)
    with torch.no_grad():
        fused_rnn.block_step("gru", **call)


def op_arguments(call):
    order = "x mixer_norm mixer_eps in_proj weight bias state mlp_norm mlp_eps gate up down"
    given = [list(call[k]) if k == "state" else call[k] for k in order.split()]
    return [*given, list(call.get("scales", ()))]


@pytest.mark.skipif(DEVICE != "cpu", reason="the op is the CPU's")
@pytest.mark.parametrize("cell", reference.CELLS)
def test_opcheck(fused_rnn, cell):
    op = getattr(fused_rnn.dispatch.ops, f"{cell}_block_step_")
    torch.library.opcheck(op.default, op_arguments(make(cell, (2, 2, 4, 6), torch.float32)))


@pytest.mark.skipif(DEVICE != "cpu", reason="the op is the CPU's")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weight", torch.ones(3, 2, 5, 5), "weight must have heads of 8 units together"),
        ("up", torch.ones(8, 6).mT, "up must be contiguous"),
        ("state", (torch.ones(2, 2, 4), torch.ones(2, 2, 4)), "state must be 1 tensors, got 2"),
        ("state", (torch.ones(4, 2, 2).mT.mT[:2],), "state must have shape"),
        ("down", torch.ones(8, 5), r"down must have shape \[8, 6\], got \[8, 5\]"),
        ("mlp_norm", torch.ones(8).half(), "mlp_norm must have dtype"),
    ],
)
def test_the_op_s_own_checks(fused_rnn, name, value, text):
    with pytest.raises(RuntimeError, match=text):
        fused_rnn.dispatch.ops.gru_block_step_(*op_arguments({**copied(CALL), name: value}))


@pytest.mark.skipif(DEVICE != "cpu", reason="the op is the CPU's")
def test_compiled_object(fused_rnn):
    call = make("slstm", (2, 2, 8, 12), torch.float32)

    def step(x, *state):
        return 2 * fused_rnn.block_step("slstm", **call | {"x": x + 1, "state": state})

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        mine, other = (tuple(s.clone() for s in call["state"]) for _ in range(2))
        assert_bitwise("y", compiled(call["x"], *mine), step(call["x"], *other))
        for got, want in zip(mine, other, strict=True):
            assert_bitwise("state", got, want)


LINEARS = "in_proj", "gate", "up", "down"


def quantized(call, packed):
    """Returns the call with linear layers of random int8, or int4 if packed, and their scales, and a
    call with their values."""
    wide, given, scales = {}, {}, []
    for name in LINEARS:
        N, K = call[name].shape
        if packed:
            given[name] = torch.randint(256, (N, K // 2), dtype=torch.uint8)
            scales.append((torch.randn(N, K // 32) / (4 * K**0.5)).bfloat16())
            wide[name] = reference.int4.unpack_int4(given[name], scales[-1]).double()
        else:
            given[name] = torch.randint(-128, 128, (N, K), dtype=torch.int8)
            scales.append(torch.rand(N) / (100 * K**0.5))
            wide[name] = given[name].double() * scales[-1].double()[:, None]
    return call | given | {"scales": tuple(scales)}, copied(call, torch.float64) | wide


INT4_SIZES = [(1, 1, 32, 32), (1, 2, 128, 512), (9, 1, 96, 160), (17, 3, 32, 64)]
FORMATS = [(False, size) for size in SIZES] + [(True, size) for size in INT4_SIZES]


@pytest.mark.parametrize(("packed", "size"), FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", reference.CELLS)
def test_quantized_weights_are_their_values(fused_rnn, cell, dtype, packed, size):
    call, exact = quantized(make(cell, size, dtype), packed)
    again = lambda: call | {"state": tuple(s.clone() for s in call["state"])}
    got = run(fused_rnn, cell, again())
    peer = run(reference, cell, again(), backend="reference")
    want = run(reference, cell, exact, backend="reference")
    terms = max(size[1] * size[2], size[3])
    for i, (y, right, other) in enumerate(zip(got, want, peer, strict=True)):
        assert_as_accurate(f"result {i}", y, right, other, terms)


def test_quantized_weights_that_do_not_fit_are_refused(fused_rnn):
    plain = make("lstm", (2, 2, 16, 64), torch.float32)
    int8, int4 = (quantized(plain, packed)[0] for packed in (False, True))
    scales = int8["scales"]
    for call, changes, says in (
        (int8, {"up": int4["up"]}, "up has dtype torch.uint8, but must be torch.int8 as in_proj"),
        (
            int8,
            {"in_proj": plain["in_proj"]},
            "in_proj has dtype torch.float32, but must be int8 or",
        ),
        (int8, {"gate": int8["gate"][:, :8]}, r"gate has shape \[64, 8\], but must be \[I, H\]"),
        (int8, {"scales": ()}, "in_proj has dtype torch.int8, but must be one of"),
        (int8, {"scales": scales[:3]}, "scales are 3, but must be a tuple of 4 tensors"),
        (
            int8,
            {"scales": (*scales[:3], scales[3].double())},
            r"scales\[3\] has dtype torch.float64",
        ),
        (int8, {"scales": (*scales[:3], scales[0])}, r"scales\[3\] has shape \[128\], but must be"),
        (int4, {"scales": scales}, r"scales\[0\] has shape \[128\], but must be \[G H, H / 32\]"),
        (
            int4,
            {"down": int4["down"][:, :8]},
            r"down has shape \[32, 8\], but must be \[H, I / 2\]",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            fused_rnn.block_step("lstm", **call | changes)
    narrow, _ = quantized(make("lstm", (2, 1, 8, 32), torch.float32), False)
    with pytest.raises(
        ValueError, match="in_proj is of 8 inputs, but needs a multiple of 32 for 4"
    ):
        fused_rnn.block_step("lstm", **narrow | {"in_proj": narrow["in_proj"].view(torch.uint8)})
