"""Tests the op that runs a torch.nn cell in inference, beside torch.nn's own cell in float64."""

import pytest
import torch
from torch import nn

from cases import DEVICE
from numerics import EPS, assert_bitwise, assert_close

CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.float64] if DEVICE == "cpu" else []
WAYS = ("dense", "no state", "no bias", "strided x", "strided state", "strided weight")


def make(name, way, dtype, B, I, D):
    """Returns the arguments of a call, and the next states in float64."""
    wide = CELLS[name](I, D, bias=way != "no bias", dtype=torch.float64, device=DEVICE)
    weights = [w.detach().to(dtype) for w in wide.parameters()]
    wide.load_state_dict(dict(zip(wide.state_dict(), (w.double() for w in weights), strict=True)))
    K = 2 if name == "lstm" else 1
    x = torch.randn(B, I, dtype=dtype, device=DEVICE)
    state = [torch.randn(B, D, dtype=dtype, device=DEVICE) for _ in range(K)]
    hx = [s.double() for s in state]
    hx = None if way == "no state" else hx[0] if K == 1 else tuple(hx)
    with torch.no_grad():
        want = wide(x.double(), hx)
    strided = lambda t: t.mT.contiguous().mT
    if way == "strided x":
        x = strided(x)
    if way == "strided state":
        state = [strided(s) for s in state]
    if way == "strided weight":
        weights = [strided(w) if w.dim() == 2 else w for w in weights]
    given = [None] * K if way == "no state" else state
    biases = weights[2:] or [None, None]
    return [x, *given, *weights[:2], *biases, False], [want] if K == 1 else list(want)


def run(fused_rnn, name, arguments):
    found = getattr(fused_rnn.dispatch.ops, f"{name}_cell_fwd")(*arguments)
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (9, 33, 130), (70, 16, 64)])
def test_a_step_is_torch_nns(fused_rnn, name, way, dtype, sizes):
    arguments, want = make(name, way, dtype, *sizes)
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    found = run(fused_rnn, name, arguments)
    for k, (got, right) in enumerate(zip(found, want, strict=True)):
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert_close(f"state {k}", got, right, 16 * EPS[dtype])
    after = [a for a in arguments if isinstance(a, torch.Tensor)]
    for was, now in zip(before, after, strict=True):
        assert_bitwise("argument", was, now)
    pointers = {t.untyped_storage().data_ptr() for t in (*found, *after)}
    assert len(pointers) == len(found) + len(after)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("way", ["dense", "no state", "no bias"])
def test_opcheck(fused_rnn, name, way):
    arguments, _ = make(name, way, torch.float32, 3, 5, 7)
    op = getattr(fused_rnn.dispatch.ops, f"{name}_cell_fwd").default
    torch.library.opcheck(op, tuple(arguments), test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("training", [True, False])
def test_a_call_without_gradients_gives_what_one_with_them_does(fused_rnn, name, training):
    arguments, _ = make(name, "dense", torch.float32, 4, 6, 8)
    K = len(arguments) - 6
    x, state, weights = arguments[0], arguments[1 : 1 + K], arguments[1 + K : 5 + K]
    for weight in weights:
        weight.requires_grad_(training)
    found = fused_rnn.run_step(name, x, state, weights, False)
    found = [found] if isinstance(found, torch.Tensor) else found
    assert all(t.requires_grad == training for t in found)
    for got, right in zip(found, run(fused_rnn, name, arguments), strict=True):
        assert_close("state", got, right.detach(), 4 * EPS[torch.float32])


def shorter(tensor):
    return tensor[..., 1:].contiguous()


BAD = {
    "x": (0, lambda t: t[None], r"x must be \[B, I\]"),
    "wide x": (0, shorter, r"weights\[0\] must have shape \[28, 4\]"),
    "short h": (1, lambda t: t[1:], "state must have shape"),
    "no h": (1, lambda t: None, "h and c must both be given or None"),
    "no c": (2, lambda t: None, "h and c must both be given or None"),
    "w_ih": (3, lambda t: t.double(), r"weights\[\d\] must have dtype"),
    "w_hh": (4, lambda t: t[0], r"w_hh must be \[G D, D\]"),
    "b_ih": (5, lambda t: None, "b_ih and b_hh must both be given or None"),
    "b_hh": (6, shorter, r"weights\[3\] must have shape"),
    "empty": (0, lambda t: t[:0], "must"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(fused_rnn, case):
    arguments, _ = make("lstm", "dense", torch.float32, 3, 5, 7)
    place, change, says = BAD[case]
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=says):
        run(fused_rnn, "lstm", arguments)
