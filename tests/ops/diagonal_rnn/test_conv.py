"""Tests causal_conv: its definition in float64, its gradients, and bad input."""

import pytest
import torch

from cases import DEVICE
from flashcell.kernels import diagonal_rnn as reference
from numerics import EPS, assert_as_accurate, assert_bitwise, assert_close

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
short = lambda dtype: str(dtype)[6:]
# A chunk of the kernel has 64 steps, a word 2 to 4 channels; the last chunks are shorter than the
# taps.
SHAPES = [
    (2, 150, 24),
    (3, 64, 33),
    (1, 65, 6),
    (2, 2, 40),
    (1, 1, 8),
    (0, 5, 8),
    (2, 0, 8),
    (2, 5, 0),
]


def draw(shape, taps, dtype, options):
    B, T, D = shape
    g = torch.Generator(DEVICE).manual_seed(B * T + D + taps)
    normal = lambda *s: torch.randn(*s, generator=g).to(dtype)
    x = normal(B, T, 2 * D)[..., D:] if "strided" in options else normal(B, T, D)
    call = {"x": x, "weight": normal(D, taps)}
    if "bias" in options:
        call["bias"] = normal(D)
    if "window" in options:
        call["window"] = normal(B, taps - 1, D)
    leaves = {k: v.detach().requires_grad_() for k, v in call.items()}
    if "reset" in options:
        leaves["reset"] = torch.rand(B, T, generator=g) < 0.2
    return leaves, normal(B, T, D)


def by_hand(x, weight, bias=None, window=None, reset=None, silu=False):
    """Computes the definition, token by token."""
    K, (B, T, D) = weight.shape[1], x.shape
    past = [x.new_zeros(B, D)] * (K - 1) if window is None else list(window.unbind(1))
    ys = []
    for t in range(T):
        if reset is not None:
            past = [torch.where(reset[:, t, None], 0.0, row) for row in past]
        past.append(x[:, t])
        y = sum(weight[:, k] * row for k, row in enumerate(past[-K:]))
        ys.append(y if bias is None else y + bias)
        past = past[len(past) - K + 1 :]
    y = torch.stack(ys, 1) if ys else x
    return torch.nn.functional.silu(y) if silu else y


def run(function, call, dy, **options):
    y = function(**call, **options)
    leaves = {k: v for k, v in call.items() if v.requires_grad}
    grads = torch.autograd.grad(
        y, list(leaves.values()), dy.to(y.dtype), allow_unused=True, materialize_grads=True
    )
    return {"y": y.detach()} | {f"d{k}": g for k, g in zip(leaves, grads, strict=True)}


def widened(call):
    wide = lambda v: v.detach().double().requires_grad_() if v.requires_grad else v
    return {k: wide(v) for k, v in call.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [(), ("bias", "window"), ("bias", "strided", "reset"), ("window", "reset")], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_its_definition(diagonal_rnn, shape, options, taps, silu, dtype):
    call, dy = draw(shape, taps, dtype, options)
    got = run(diagonal_rnn.causal_conv, call, dy, silu=silu)
    peer = run(reference.causal_conv, call, dy, silu=silu, backend="reference")
    exact = run(by_hand, widened(call), dy, silu=silu)
    B, T, _ = shape
    for key, want in exact.items():
        terms = B * T if key in ("dweight", "dbias") else taps
        assert_as_accurate(key, got[key], want, peer[key], terms)
        assert_close(f"reference {key}", peer[key], want, (4 + terms**0.5) * EPS[dtype])


@pytest.mark.skipif(DEVICE != "cuda", reason="about CUDA's kernel")
def test_the_kernel_runs_and_repeats(diagonal_rnn):
    """The same bits twice, in a graph of torch.compile, and for rows of any width and alignment."""
    call, dy = draw((3, 200, 64), 4, torch.bfloat16, ("bias", "window", "reset"))
    first = run(diagonal_rnn.causal_conv, call, dy, silu=True, backend="cuda")
    again = run(diagonal_rnn.causal_conv, call, dy, silu=True, backend="cuda")
    compiled = torch.compile(diagonal_rnn.causal_conv, fullgraph=True, backend="aot_eager")
    traced = run(compiled, call, dy, silu=True, backend="cuda")
    for key, value in first.items():
        assert_bitwise(key, again[key], value)
        assert_bitwise(key, traced[key], value)
    x = torch.cat([call["x"].new_zeros(3, 200, 1), call["x"]], 2)[..., 1:].detach()
    shifted = diagonal_rnn.causal_conv(**{**call, "x": x}, silu=True, backend="cuda")
    assert_bitwise("y", shifted.detach(), first["y"])
    window = call["window"].detach().clone()
    alone = diagonal_rnn.causal_conv(call["x"][:, :70], call["weight"], call["bias"], window)
    rest = diagonal_rnn.causal_conv(
        call["x"][:, 70:], call["weight"], call["bias"], call["x"][:, 67:70]
    )
    whole = diagonal_rnn.causal_conv(call["x"], call["weight"], call["bias"], window)
    assert_bitwise("y", torch.cat([alone, rest], 1).detach(), whole.detach())


@pytest.mark.skipif(DEVICE != "cuda", reason="about CUDA's kernel")
def test_opcheck(diagonal_rnn):
    call, _ = draw((2, 9, 8), 4, torch.float32, ("window", "reset"))
    weight = torch.randn(5, 8, requires_grad=True)
    op = diagonal_rnn.dispatch.ops.causal_conv_fwd.default
    torch.library.opcheck(op, (call["x"], weight, call["window"], call["reset"], True))


X, W = torch.randn(2, 5, 8), torch.randn(8, 4)
WRONG = {
    "x-rank": ({"x": X[0]}, ValueError, r"x has shape \[5, 8\], but must be \[B, T, D\]"),
    "x-int": ({"x": X.int()}, TypeError, "x has dtype torch.int32"),
    "weight": ({"weight": W.mT}, ValueError, r"weight has shape \[4, 8\], but must be \[D, K\]"),
    "weight-int": ({"weight": W.int()}, TypeError, "weight has dtype torch.int32"),
    "taps": (
        {"x": X[:0], "weight": W[:, :1].expand(8, 2**16 + 1)},
        ValueError,
        "weight has 65537 taps, but must have at most 65536",
    ),
    "window-int": ({"window": X[:, :3].int()}, TypeError, "window has dtype torch.int32"),
    "bias": ({"bias": X[0]}, ValueError, r"bias has shape \[5, 8\], but must be \[D\] = \[8\]"),
    "window": ({"window": X}, ValueError, r"must be \[B, K - 1, D\] = \[2, 3, 8\]"),
    "reset": ({"reset": X[..., 0]}, TypeError, "reset has dtype torch.float32"),
    "backend": ({"backend": "cpu"}, ValueError, "backend is 'cpu'"),
}


@pytest.mark.parametrize("row", WRONG)
def test_bad_input(diagonal_rnn, row):
    arguments, error, message = WRONG[row]
    for entry in (diagonal_rnn, reference):
        with pytest.raises(error, match=message):
            entry.causal_conv(**{"x": X, "weight": W, **arguments})
