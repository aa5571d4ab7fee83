"""Tests a decoding step of a diagonal cell's block against the ops on whole sequences."""

import pytest
import torch
from torch.nn.functional import silu

from cases import DEVICE
from flashcell.kernels import diagonal_rnn as reference
from numerics import assert_as_accurate, assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1, 16), (3, 2, 10), (2, 4, 66), (64, 2, 128)]  # B, heads, their width


def normal(*shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv_step(diagonal_rnn, dtype, size, bias):
    B, N, J = size
    D, T = N * J, 6
    weight, xs = normal(D, 4, dtype=dtype), normal(B, T, 2 * D, dtype=dtype)
    offset, window = normal(D, dtype=dtype) if bias else None, normal(B, 3, D, dtype=dtype)

    def whole(*tensors):
        xs, weight, window, *offset = tensors
        return reference.causal_conv(
            xs[..., D:], weight, *offset, window=window, silu=True, backend="reference"
        )

    tensors = [xs, weight, window, *([offset] if bias else [])]
    exact, peer = whole(*(t.double() for t in tensors)), whole(*tensors)
    seen = torch.cat([window, xs[..., D:]], 1)
    ys = []
    for t in range(T):
        ys.append(diagonal_rnn.conv_step(xs[:, t, D:], weight, offset, window))
        assert_bitwise("window", window, seen[:, t + 1 : t + 4])
    assert_as_accurate("y", torch.stack(ys, 1), exact, peer, 4)


def whole_mixer(cell, xs, weight, bias, rows, state, skip, gates, bound):
    """Runs a sequence with the ops that training uses; `state` is in the state dtype."""
    rows = [r.clamp(-bound, bound) for r in rows]
    u = reference.headwise_linear(xs, weight, bias)
    h, last = getattr(reference, cell)(u, *rows, state, backend="reference")
    return (h + skip * xs) * silu(gates), last


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", reference.CELLS)
def test_mixer_step(diagonal_rnn, cell, dtype, size, bias):
    """Four single tokens have the states of a sequence of four; the bound clips some weights."""
    (B, N, J), spec, T = size, reference.CELLS[cell], 4
    D, wide = N * J, torch.float32
    xs, gates = normal(B, T, D, dtype=dtype), normal(B, T, 2 * D, dtype=dtype)
    weight, skip = normal(N, 3, J, J, dtype=dtype, scale=J**-0.5), normal(D, dtype=dtype)
    offset = normal(3, D, dtype=dtype) if bias else None
    rows = tuple(normal(n, D, dtype=dtype) for n in (3, spec.weights - 3) if n)
    state = tuple(normal(B, D, dtype=wide) for _ in range(spec.states))

    def whole(to):
        to_all = lambda ts: tuple(t.to(to) for t in ts)
        own = offset if offset is None else offset.to(to)
        given = xs.to(to), weight.to(to), own, to_all(rows)
        carried = tuple(s.to(torch.promote_types(to, wide)) for s in state)
        return whole_mixer(cell, *given, carried, skip.to(to), gates[..., D:].to(to), 0.5)

    (exact, exact_last), (peer, peer_last) = whole(torch.float64), whole(dtype)
    mine, ys = tuple(s.clone() for s in state), []
    for t in range(T):
        ys.append(
            diagonal_rnn.mixer_step(
                cell, xs[:, t].contiguous(), weight, offset, rows, mine, skip, gates[:, t, D:],
                bound=0.5,
            )
        )  # fmt: skip
    assert_as_accurate("y", torch.stack(ys, 1), exact, peer, J, on_cuda=(dtype, False))
    for k in range(spec.states):
        sides = exact_last[k], peer_last[k]  # u is rounded before the cell
        assert_as_accurate(f"state {k}", mine[k], *sides, J, on_cuda=(dtype, False))


def given(B=2, N=2, J=4, dtype=torch.float32):
    make = lambda *shape: normal(*shape, dtype=dtype)
    D = N * J
    return {
        "cell": "flash_gru", "x": make(B, D), "weight": make(N, 3, J, J), "bias": make(3, D),
        "rows": (make(3, D),), "state": (make(B, D).float(),), "skip": make(D), "gate": make(B, D),
    }  # fmt: skip


BAD = [
    ({"cell": "gru"}, ValueError, "cell is 'gru'"),
    ({"rows": ()}, ValueError, "rows is 0 tensors, but flash_gru needs a tuple of 1"),
    ({"state": ()}, ValueError, "state is 0 tensors, but flash_gru needs a tuple of 1"),
    ({"skip": torch.ones(3)}, ValueError, r"skip has shape \[3\], but must be \[D\] = \[8\]"),
    ({"gate": torch.ones(2, 8).double()}, TypeError, "gate has dtype torch.float64, but must be"),
    ({"state": (torch.ones(2, 8).half(),)}, TypeError, r"state\[0\] has dtype torch.float16"),
    ({"bias": torch.ones(2, 8)}, ValueError, r"bias has shape \[2, 8\], but must be \[3, D\]"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD)
def test_bad_input(diagonal_rnn, change, error, text):
    with pytest.raises(error, match=text):
        diagonal_rnn.mixer_step(**{**given(), **change})


def test_conv_step_names_what_is_no_window():
    x, weight = torch.ones(2, 8), torch.ones(8, 4)
    with pytest.raises(TypeError, match="window is a NoneType, but must be a tensor"):
        reference.conv_step(x, weight, None, None)


def test_a_gradient_is_refused(diagonal_rnn):
    call = given()
    call["skip"].requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient"):
        diagonal_rnn.mixer_step(**call)
    x, weight = call["x"], torch.ones(8, 4, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        diagonal_rnn.conv_step(x, weight, None, torch.zeros(2, 3, 8))


def conv_arguments(B, D, dtype=torch.float32):
    return normal(D, 4, dtype=dtype), normal(D, dtype=dtype), normal(B, 3, D, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["odd rows", "odd start", "columns", "empty"])
def test_conv_step_of_any_strides(diagonal_rnn, layout, dtype):
    B, D = 3, 0 if layout == "empty" else 10
    weight, bias, window = conv_arguments(B, D, dtype)
    x = {
        "odd rows": lambda: normal(B, D + 1, dtype=dtype)[:, :D],
        "odd start": lambda: normal(B, D + 2, dtype=dtype)[:, 1:-1],
        "columns": lambda: normal(D, B, dtype=dtype).mT,
        "empty": lambda: normal(B, 0, dtype=dtype),
    }[layout]()
    peer_window, wide = window.clone(), window.double()
    exact = reference.conv_step(x.double(), weight.double(), bias.double(), wide)
    peer = reference.conv_step(x, weight, bias, peer_window, backend="reference")
    assert_as_accurate("y", diagonal_rnn.conv_step(x, weight, bias, window), exact, peer, 4)
    assert_bitwise("window", window, peer_window)


def test_a_state_that_is_not_contiguous_is_changed(diagonal_rnn):
    B, D = 3, 10
    weight, bias, window = conv_arguments(B, D)
    x, strided = normal(B, D, dtype=torch.float32), window.mT.contiguous().mT
    y = diagonal_rnn.conv_step(x, weight, bias, strided)
    assert torch.allclose(y, diagonal_rnn.conv_step(x, weight, bias, window))
    assert_bitwise("window", strided, window)
    with pytest.raises(ValueError, match="contiguous"):
        diagonal_rnn.conv_step(x, weight, bias, strided, backend=DEVICE)


def mix_arguments(B, N, J, dtype=torch.float32):
    rows = lambda *shape: normal(*shape, N * J, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    state = [normal(B, N * J, dtype=wide)]
    return [normal(N, B, 3, J, dtype=dtype), rows(3), None, rows(3), *state, None, rows(B), rows(), rows(B)]  # fmt: skip


def test_heads_without_channels(diagonal_rnn):
    """Nothing divides by the heads' width, which is 0."""
    step = diagonal_rnn.dispatch.ops.flash_gru_mix_step_
    for N, B in ((2, 3), (0, 3), (2, 0)):
        assert step(*mix_arguments(B, N, 0), 1.0).shape == (B, 0)
    uneven = mix_arguments(3, 2, 4)
    uneven[0] = uneven[0][..., :0]
    with pytest.raises(RuntimeError, match="u must have heads of an even width"):
        step(*uneven, 1.0)


@pytest.mark.skipif(DEVICE != "cpu", reason="fp64 is the CPU's")
def test_the_bound_is_in_the_dtype_of_the_sums(diagonal_rnn):
    """1.3 in fp32 is 1.2999999523."""
    arguments = mix_arguments(3, 2, 4, torch.float64)
    arguments[1] *= 10
    u, a, _, bias, h, _, x, skip, gate = arguments
    before = h.clone()
    y = diagonal_rnn.dispatch.ops.flash_gru_mix_step_(*arguments, 1.3)
    whole = u.permute(1, 2, 0, 3).flatten(2) + bias
    last, _ = reference.flash_gru_step(whole, a.clamp(-1.3, 1.3), (before,), backend="reference")
    assert (y - (last + skip * x) * silu(gate)).abs().max() < 1e-13


def test_autocast_changes_nothing(diagonal_rnn):
    B, D = 2, 8
    x, gate, weight = torch.randn(B, D), torch.randn(B, D), torch.randn(2, 3, 4, 4)
    rows, skip = (torch.randn(3, D),), torch.randn(D)
    taps, window = torch.randn(D, 3), torch.randn(B, 2, D)

    def run():
        state = (torch.zeros(B, D),)
        y = diagonal_rnn.mixer_step("flash_gru", x, weight, None, rows, state, skip, gate)
        return y, diagonal_rnn.conv_step(x, taps, None, window.clone())

    usual = run()
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(run(), usual, rtol=0, atol=0)
