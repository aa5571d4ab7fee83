"""Tests the ops of torch.nn's cells beside torch.nn's own cells in float64."""

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
SIZES = [(1, 1, 1), (3, 5, 7), (9, 33, 130), (70, 16, 64)]
WAYS = ("dense", "no state", "no bias", "strided x", "strided state", "strided weight")


def make(name, way, dtype, B, I, D):
    """Returns the arguments of a call, and torch.nn's cell in float64 with the same weights."""
    wide = CELLS[name](I, D, bias=way != "no bias", dtype=torch.float64, device=DEVICE)
    weights = [w.detach().to(dtype) for w in wide.parameters()]
    wide.load_state_dict(dict(zip(wide.state_dict(), (w.double() for w in weights), strict=True)))
    K = 2 if name == "lstm" else 1
    x = torch.randn(B, I, dtype=dtype, device=DEVICE)
    state = [torch.randn(B, D, dtype=dtype, device=DEVICE) for _ in range(K)]
    strided = lambda t: t.mT.contiguous().mT
    if way == "strided x":
        x = strided(x)
    if way == "strided state":
        state = [strided(s) for s in state]
    if way == "strided weight":
        weights = [strided(w) if w.dim() == 2 else w for w in weights]
    given = [None] * K if way == "no state" else state
    biases = weights[2:] or [None, None]
    return [x, *given, *weights[:2], *biases, False], wide


def expect(wide, arguments):
    """Returns the next states in float64, and what they are computed from: x, states and weights.

    On the CPU, because torch's gradients of an LSTM cell's two biases are one tensor on a GPU."""
    wide, given = wide.cpu(), [a if a is None else a.cpu().double() for a in arguments[:-5]]
    x, *state = (a if a is None else a.requires_grad_() for a in given)
    hx = None if state[0] is None else tuple(state) if len(state) == 2 else state[0]
    next_state = wide(x, hx)
    next_state = [next_state] if isinstance(next_state, torch.Tensor) else list(next_state)
    return next_state, [x, *(s for s in state if s is not None), *wide.parameters()]


def run(fused_rnn, name, arguments):
    found = getattr(fused_rnn.dispatch.ops, f"{name}_cell_fwd")(*arguments)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def grid(function):
    for mark in (("name", CELLS), ("way", WAYS), ("dtype", DTYPES), ("sizes", SIZES)):
        function = pytest.mark.parametrize(*mark)(function)
    return function


@grid
def test_a_step_is_torch_nns(fused_rnn, name, way, dtype, sizes):
    arguments, wide = make(name, way, dtype, *sizes)
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    found = run(fused_rnn, name, arguments)
    for k, (got, right) in enumerate(zip(found, expect(wide, arguments)[0], strict=True)):
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert_close(f"state {k}", got.cpu(), right.detach(), 16 * EPS[dtype])
    after = [a for a in arguments if isinstance(a, torch.Tensor)]
    for was, now in zip(before, after, strict=True):
        assert_bitwise("argument", was, now)
    pointers = {t.untyped_storage().data_ptr() for t in (*found, *after)}
    assert len(pointers) == len(found) + len(after)


@grid
@pytest.mark.parametrize("reads", ["all", "first", "last"])
def test_gradients_are_torch_nns(fused_rnn, name, way, dtype, sizes, reads):
    """Of a loss of all next states, of h or of c."""
    if name == "rnn_relu" and dtype.itemsize == 2:
        pytest.skip("rounding moves units across the kink")
    arguments, wide = make(name, way, dtype, *sizes)
    places = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}[reads]
    want, sources = expect(wide, arguments)
    dnext = [torch.randn_like(w) for w in want]
    right = torch.autograd.grad(want[places], sources, dnext[places])

    leaves = [a.detach().requires_grad_() for a in arguments[:-1] if a is not None]
    K = len(sources) - 1 - len(list(wide.parameters()))
    x, state, weights = leaves[0], leaves[1 : 1 + K], leaves[1 + K :]
    found = fused_rnn.run_step(name, x, state, weights, False)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    for got, wanted in zip(found, want, strict=True):
        assert_close("state", got.detach().cpu(), wanted.detach(), 16 * EPS[dtype])
    given = [d.to(dtype).to(DEVICE) for d in dnext]
    if way == "strided state":
        given = [d.mT.contiguous().mT for d in given]
    grads = torch.autograd.grad(found[places], leaves, given[places])
    for got, wanted in zip(grads, right, strict=True):
        assert got.dtype == dtype
        # a single one may be near zero, the difference of larger terms
        scale = max(1.0, wanted.abs().max().item())
        assert (got.cpu().double() - wanted).abs().max().item() <= 24 * EPS[dtype] * scale
    pointers = {g.untyped_storage().data_ptr() for g in grads}
    assert len(pointers) == len(grads)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("way", ["dense", "no state", "no bias"])
@pytest.mark.parametrize("wants", [(True, True), (False, True), (True, False)])
def test_opcheck(fused_rnn, name, way, wants):
    arguments, _ = make(name, way, torch.float32, 3, 5, 7)
    ops, checks = fused_rnn.dispatch.ops, ["test_schema", "test_faketensor"]
    torch.library.opcheck(
        getattr(ops, f"{name}_cell_fwd").default, tuple(arguments), test_utils=checks
    )
    forward = getattr(ops, f"{name}_cell_train_fwd").default
    torch.library.opcheck(forward, tuple(arguments), test_utils=checks)
    *next_state, saved, h_prev = forward(*arguments)
    weights = arguments[-5:-1]
    call = (*next_state, arguments[0], *weights, saved, h_prev, False, *wants)
    backward = getattr(ops, f"{name}_cell_bwd").default
    torch.library.opcheck(backward, call, test_utils=checks)
    dx, *rest = backward(*call)
    assert (dx.numel() > 0, rest[0].numel() > 0) == wants


def shorter(tensor):
    return tensor[..., 1:].contiguous()


BAD = {
    "x": (0, lambda t: t[None], r"x must be \[B, I\]"),
    "wide x": (0, shorter, r"w_ih must have shape \[28, 4\]"),
    "short h": (1, lambda t: t[1:], r"h must have shape \[3, 7\]"),
    "h of another dtype": (1, lambda t: t.half(), "h must have dtype Float, got Half"),
    "wide c": (2, shorter, r"c must have shape \[3, 7\]"),
    "no h": (1, lambda t: None, "h and c must both be given or None"),
    "no c": (2, lambda t: None, "h and c must both be given or None"),
    "w_ih": (3, lambda t: t.double(), "w_ih must have dtype"),
    "w_hh": (4, lambda t: t[0], r"w_hh must be \[G D, D\]"),
    "b_ih": (5, lambda t: None, "b_ih and b_hh must both be given or None"),
    "b_hh": (6, shorter, r"b_hh must have shape \[28\]"),
    "empty": (0, lambda t: t[:0], "must"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(fused_rnn, case):
    arguments, _ = make("lstm", "dense", torch.float32, 3, 5, 7)
    place, change, says = BAD[case]
    arguments[place] = change(arguments[place])
    for op in ("cell_fwd", "cell_train_fwd"):
        with pytest.raises(RuntimeError, match=says):
            getattr(fused_rnn.dispatch.ops, f"lstm_{op}")(*arguments)


BAD_BACK = {
    "dh": (0, shorter, r"dh must have shape \[3, 7\]"),
    "a number for dh": (0, lambda t: t.sum(), r"dh must have shape \[3, 7\]"),
    "x": (-10, shorter, r"w_ih must have shape \[\d+, 4\]"),
    "saved": (-5, lambda t: t[:, 1:], r"saved must have shape \[3, 5, 1, 7\]"),
    "h_prev": (-4, lambda t: t[1:], r"h_prev must have shape \[3, 1, 7\]"),
    "a last gradient": (-11, lambda t: t.double(), "d[hc] must have dtype"),
}


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("case", BAD_BACK)
def test_wrong_arguments_of_the_backward_are_refused(fused_rnn, name, case):
    arguments, _ = make(name, "dense", torch.float32, 3, 5, 7)
    ops = fused_rnn.dispatch.ops
    *next_state, saved, h_prev = getattr(ops, f"{name}_cell_train_fwd")(*arguments)
    call = [*next_state, arguments[0], *arguments[-5:-1], saved, h_prev, False, True, True]
    place, change, says = BAD_BACK[case]
    call[place] = change(call[place])
    with pytest.raises(RuntimeError, match=says):
        getattr(ops, f"{name}_cell_bwd")(*call)
