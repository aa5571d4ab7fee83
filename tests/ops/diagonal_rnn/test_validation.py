"""Tests that diagonal-rnn's errors say what is wrong, and that its ops are fully registered and
compile."""

import pytest
import torch

from cases import DEVICE, Case, eager_and_compiled
from diagonal_cases import WEIGHTS, in_heads, leaves, make
from flashcell.kernels import diagonal_rnn as reference
from numerics import EPS, assert_bitwise, assert_close

CELLS = reference.CELLS
OTHER = "cuda" if DEVICE == "cpu" else "cpu"
B, T, D = 2, 4, 8


def base(name="flash_lstm"):
    return make(CELLS[name], Case(B, T, 1, D, ("state",)), torch.float32)


def changed(**arguments):
    call = base()
    call.update({k: v(call) if callable(v) else v for k, v in arguments.items()})
    return call


def packed(**arguments):
    """Returns one row of six steps."""
    return changed(x=torch.randn(1, 6, 3, D), **arguments)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


TABLE = {  # id -> (arguments, error, message)
    "x-list": (changed(x=[1.0]), TypeError, "x is a list, but must be a tensor"),
    "x-rank": (
        changed(x=lambda c: c["x"][0]),
        ValueError,
        r"x has shape \[4, 3, 8\], but must be \[B, T, 3, D\] for flash_lstm",
    ),
    "x-gates": (changed(x=lambda c: c["x"][:, :, :2]), ValueError, r"must be \[B, T, 3, D\]"),
    "x-int": (changed(x=lambda c: c["x"].int()), TypeError, "x has dtype torch.int32"),
    "x-heads": (
        changed(x=torch.randn(0, B, T, 3, D)),
        ValueError,
        r"or in N > 0 heads \[N, B, T, 3, D / N\]",
    ),
    "a-heads": (
        changed(x=torch.randn(2, B, T, 3, D)),
        ValueError,
        r"a has shape \[3, 8\], but must be \[3, D\] = \[3, 16\]",
    ),
    "bias-shape": (
        changed(bias=torch.randn(1, D)),
        ValueError,
        r"bias has shape \[1, 8\], but must be \[3, D\]",
    ),
    "a-none": (changed(a=None), TypeError, "a is a NoneType"),
    "a-shape": (
        changed(a=torch.randn(2, D)),
        ValueError,
        r"a has shape \[2, 8\], but must be \[3, D\]",
    ),
    "a-int": (changed(a=torch.ones(3, D).long()), TypeError, "a has dtype torch.int64"),
    "a-device": (changed(a=torch.randn(3, D, device="meta")), ValueError, "a is on meta"),
    "p-none": (changed(p=None), TypeError, "p is a NoneType, but must be a tensor"),
    "p-none-bias": (changed(p=None, bias=torch.randn(3, D)), TypeError, "p is a NoneType"),
    "p-shape": (changed(p=torch.randn(3, D)), ValueError, r"must be \[2, D\] = \[2, 8\]"),
    "state-tensor": (changed(state=torch.zeros(B, D)), ValueError, "needs a tuple of 2 tensors"),
    "state-shape": (
        changed(state=lambda c: tuple(s[:1] for s in c["state"])),
        ValueError,
        r"state\[0\] has shape \[1, 8\], but must be \[B, D\] = \[2, 8\]",
    ),
    "state-int": (
        changed(state=lambda c: tuple(s.int() for s in c["state"])),
        TypeError,
        r"state\[0\] has dtype torch.int32",
    ),
    "reset-shape": (
        changed(reset=torch.zeros(T, B).bool()),
        ValueError,
        r"reset has shape \[4, 2\]",
    ),
    "hold-float": (changed(hold=torch.zeros(B, T)), TypeError, "hold has dtype torch.float32"),
    "lengths-long": (changed(lengths=ints(1, 5)), ValueError, "lengths.*0..*4"),
    "lengths-count": (changed(lengths=ints(1)), ValueError, r"lengths has shape \[1\]"),
    "cu-batch": (changed(cu_seqlens=ints(0, 4)), ValueError, "x has batch 2"),
    "cu-order": (packed(cu_seqlens=ints(0, 7, 6)), ValueError, "must start at 0"),
    "cu-states": (packed(cu_seqlens=ints(0, 6)), ValueError, r"\[S, D\] = \[1, 8\]"),
    "cu-lengths": (packed(cu_seqlens=ints(0, 6), lengths=ints(6)), ValueError, "only one may be"),
    "method": (
        changed(method="deer"),
        ValueError,
        "method is 'deer', but must be one of auto, sequential",
    ),
    "tol": (changed(tol=-1.0), ValueError, "tol is -1.0, but must be None or a number >= 0"),
    "tol-text": (changed(tol="1e-3"), TypeError, "tol is a str, but must be None or a number"),
    "max_iters-flag": (changed(max_iters=True), ValueError, "max_iters is True, but must be None"),
    "max_iters": (
        changed(max_iters=1.5),
        ValueError,
        "max_iters is 1.5, but must be None or an int",
    ),
    "backend": (changed(backend="gpu"), ValueError, "backend is 'gpu', but must be one of"),
    "backend-other": (changed(backend=OTHER), ValueError, f"but the tensors are on '{DEVICE}'"),
}


@pytest.fixture(params=["kernel", "reference"])
def entry(request):
    """Both entry points give the same errors: the Hub's binary and the torch reference."""
    return request.getfixturevalue("diagonal_rnn") if request.param == "kernel" else reference


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.mark.parametrize("row", TABLE)
def test_sequence(entry, row, monkeypatch):
    monkeypatch.setenv("FLASHCELL_CHECK", "1")  # checks values too, which the CPU always does
    call, error, message = TABLE[row]
    with pytest.raises(error, match=message):
        entry.flash_lstm(**call)


def test_step(entry):
    call = base()
    x, a, p = call["x"], call["a"], call["p"]
    with pytest.raises(ValueError, match=r"x has shape \[4, 8\], but must be \[B, 3, D\]"):
        entry.flash_lstm_step(x[0, :, 0], a, p)
    with pytest.raises(ValueError, match=r"a has shape \[3, 8\], but must be \[3, D\] = \[3, 16\]"):
        entry.flash_lstm_step(x, a, p)  # two heads of eight channels
    with pytest.raises(ValueError, match=r"state\[0\] has shape \[1, 8\]"):
        entry.flash_gru_step(x[:, 0], a, (call["state"][0][:1],))


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU")
@pytest.mark.parametrize("method", ["multiple_shooting", "newton"])
def test_methods_parallel_in_time_say_where_they_run(diagonal_rnn, method):
    with pytest.raises(ValueError, match=rf"method is '{method}', .* on CUDA, and with backend="):
        diagonal_rnn.flash_lstm(**base(), method=method)


def test_backend_by_name_is_never_replaced():
    with pytest.raises(RuntimeError, match="this copy of the kernel holds no binary"):
        reference.flash_lstm(**base(), backend=DEVICE)


def op_arguments(name, options, requires_grad=True):
    call, _ = leaves(make(CELLS[name], Case(2, 4, 1, 8, options), torch.float32))
    weight = (
        torch.cat([call[k] for k in (*WEIGHTS, "bias") if k in call])
        .detach()
        .requires_grad_(requires_grad)
    )
    x = in_heads(call["x"].detach(), 2).requires_grad_() if "heads" in options else call["x"]
    state = torch.stack(call["state"]).detach().requires_grad_() if "state" in call else None
    masks = [call.get(k) for k in ("reset", "hold", "lengths", "cu_seqlens")]
    return [x, weight, state, *masks, "sequential", -1.0, -1]


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "options",
    [("state", "reset", "hold"), ("state", "lengths"), ("state", "cu"), (), ("bias", "heads")],
)
def test_opcheck(diagonal_rnn, name, options, save):
    op = getattr(diagonal_rnn.dispatch.ops, f"{name}_fwd").default
    torch.library.opcheck(op, (*op_arguments(name, options), save))


@pytest.mark.parametrize("op", ["scan_fwd", "block_scan_fwd"])
def test_opcheck_scan(diagonal_rnn, op):
    block = () if op == "scan_fwd" else (2,)
    leaf = lambda *shape: torch.rand(*shape, *block, requires_grad=True)
    a, b, h0 = leaf(2, 3, 4, *block), leaf(2, 3, 4), leaf(2, 4)
    for given in (h0, None):
        torch.library.opcheck(getattr(diagonal_rnn.dispatch.ops, op).default, (a, b, given, True))


def test_ops_called_directly_are_safe(diagonal_rnn, name):
    """torch.ops is an entry point too: wrong shapes raise there instead of reading out of bounds."""
    fwd = getattr(diagonal_rnn.dispatch.ops, f"{name}_fwd")
    x, weight, *rest = op_arguments(name, ())
    for bad_x, bad_weight in ((x[0], weight), (x, weight[:, :1]), (x[:, :, :2], weight)):
        with pytest.raises(RuntimeError, match=r"x|weight"):
            fwd(bad_x, bad_weight, *rest, False)
    with pytest.raises(RuntimeError, match="weight must have dtype"):
        fwd(x, weight.double(), *rest, False)
    with pytest.raises(RuntimeError, match="method must be"):
        fwd(x, weight, *rest[:-3], "jump", -1.0, -1, False)
    if DEVICE == "cpu":  # CUDA clamps values, see ops/diagonal_rnn/test_cuda.py
        with pytest.raises(RuntimeError, match="lengths must be in"):
            fwd(x, weight, None, None, None, ints(1, 9), None, *rest[-3:], False)


@pytest.mark.skipif(DEVICE != "cpu", reason="fp64 is the CPU's")
def test_gradcheck(diagonal_rnn, name):
    """Gradients agree with finite differences, with held steps, which read the state from `saved`."""
    options = ("state", "reset", "hold")
    call, sources = leaves(make(CELLS[name], Case(2, 5, 1, 3, options), torch.float64))

    def outputs(*_):
        h, last = getattr(diagonal_rnn, name)(**call)
        return (h, *last)

    assert torch.autograd.gradcheck(outputs, tuple(sources.values()))


def test_compiled_object(diagonal_rnn, name):
    """With fullgraph, forward and backward give the same bits as eager."""
    call, sources = leaves(make(CELLS[name], Case(2, 5, 1, 8, ("state", "reset")), torch.float32))
    x, a = sources["x"], sources["a"]

    def model(x, a):
        h, last = getattr(diagonal_rnn, name)(**{**call, "x": x * 2, "a": a})
        scanned = diagonal_rnn.linear_scan(torch.sigmoid(h), h, last[0])
        return h + scanned

    for eager, traced in zip(*eager_and_compiled(model, x, a), strict=True):
        assert_bitwise("compiled", traced, eager)


@pytest.mark.slow
def test_compiled_by_inductor(diagonal_rnn):
    """Values and gradients are right where inductor compiles what stands before and after the op."""
    call, sources = leaves(base())
    x, a = sources["x"], sources["a"]

    def model(x, a):
        h, (last, c) = diagonal_rnn.flash_lstm(**{**call, "x": 2 * x, "a": a})
        return torch.sigmoid(h) + (last * c)[:, None]

    for eager, traced in zip(*eager_and_compiled(model, x, a, backend="inductor"), strict=True):
        assert_close("compiled", traced, eager, EPS[torch.float32])  # observed 0.13
