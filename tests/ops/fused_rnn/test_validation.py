"""Tests bad input: the errors of a table, which name the argument, what it was and what it must be."""

import pytest
import torch

from cases import DEVICE, Case, make
from flashcell.kernels import fused_rnn as reference

CELL = reference.CELLS["lstm"]
B, T, N, D = 2, 4, 2, 8
OTHER = "cuda" if DEVICE == "cpu" else "cpu"  # another device than the tensors'


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """On CUDA values are read only on request, because reading waits for the GPU."""
    monkeypatch.setenv("FLASHCELL_CHECK", "1")


def base(options=("state",)):
    return make(CELL, Case(B, T, N, D, options), torch.float32)


def changed(**arguments):
    call = base()
    call.update({k: v(call) if callable(v) else v for k, v in arguments.items()})
    return call


def packed(**arguments):
    """Returns one row of six steps and two documents."""
    call = base()
    call["x"] = torch.randn(1, 6, 4, N, D)
    call.update(arguments)
    return call


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


TABLE = {  # id -> (arguments, error, message)
    "x-list": (changed(x=[1.0]), TypeError, "x is a list, but must be a tensor"),
    "x-rank": (changed(x=lambda c: c["x"][0]), ValueError, r"x has shape \[4, 4, 2, 8\]"),
    "x-gates": (changed(x=lambda c: c["x"][:, :, :3]), ValueError, "with G = 4 for lstm"),
    "x-int": (changed(x=lambda c: c["x"].int()), TypeError, "x has dtype torch.int32"),
    "x-complex": (changed(x=lambda c: c["x"].cfloat()), TypeError, "x has dtype torch.complex64"),
    "weight-none": (changed(weight=None), TypeError, "weight is a NoneType"),
    "weight-rank": (changed(weight=lambda c: c["weight"][0]), ValueError, "weight has shape"),
    "weight-heads": (changed(weight=lambda c: c["weight"][:, :1]), ValueError, r"\[4, 2, 8, 8\]"),
    "weight-square": (changed(weight=torch.randn(4, N, D, D + 1)), ValueError, r"\[G, N, D, D\]"),
    "weight-int": (changed(weight=lambda c: c["weight"].long()), TypeError, "weight has dtype"),
    "weight-device": (changed(weight=lambda c: c["weight"].to("meta")), ValueError, "is on meta"),
    "bias-shape": (changed(bias=torch.randn(4, N)), ValueError, r"bias has shape \[4, 2\]"),
    "bias-rows": (changed(bias=torch.randn(8, N, D)), ValueError, r"\[R, N, D\] = \[4, 2, 8\]"),
    "bias-int": (changed(bias=torch.ones(4, N, D).int()), TypeError, "bias has dtype"),
    "bias-number": (changed(bias=0.0), TypeError, "bias is a float"),
    "state-tensor": (changed(state=torch.zeros(B, N, D)), ValueError, "needs a tuple of 2 tensors"),
    "state-count": (changed(state=lambda c: c["state"][:1]), ValueError, "state is 1 tensors"),
    "state-shape": (
        changed(state=lambda c: tuple(s[:1] for s in c["state"])),
        ValueError,
        r"state\[0\] has shape \[1, 2, 8\], but must be \[B, N, D\] = \[2, 2, 8\]",
    ),
    "state-int": (
        changed(state=lambda c: tuple(s.int() for s in c["state"])),
        TypeError,
        r"state\[0\] has dtype torch.int32",
    ),
    "state-none": (
        changed(state=lambda c: (c["state"][0], None)),
        TypeError,
        r"state\[1\] is a Non",
    ),
    "reset-int": (changed(reset=torch.zeros(B, T).int()), TypeError, "reset has dtype torch.int32"),
    "reset-shape": (
        changed(reset=torch.zeros(T, B).bool()),
        ValueError,
        r"reset has shape \[4, 2\]",
    ),
    "reset-device": (changed(reset=torch.zeros(B, T).bool().to("meta")), ValueError, "reset is on"),
    "hold-float": (changed(hold=torch.zeros(B, T)), TypeError, "hold has dtype torch.float32"),
    "hold-shape": (changed(hold=torch.zeros(B, T + 1).bool()), ValueError, r"\[B, T\] = \[2, 4\]"),
    "lengths-list": (changed(lengths=[1, 2]), TypeError, "lengths is a list"),
    "lengths-float": (changed(lengths=torch.ones(B)), TypeError, "lengths has dtype torch.float32"),
    "lengths-count": (changed(lengths=ints(1)), ValueError, r"lengths has shape \[1\]"),
    "lengths-rank": (changed(lengths=ints(1, 2)[None]), ValueError, "one dimension"),
    "lengths-long": (changed(lengths=ints(1, 5)), ValueError, "lengths.*0..*4"),
    "lengths-negative": (changed(lengths=ints(-1, 4)), ValueError, r"lengths is \[-1, 4\]"),
    "cu-batch": (
        changed(cu_seqlens=ints(0, 4)),
        ValueError,
        "x has batch 2, but must have batch 1",
    ),
    "cu-empty": (packed(cu_seqlens=ints()), ValueError, "cu_seqlens is empty"),
    "cu-float": (packed(cu_seqlens=torch.tensor([0.0, 6])), TypeError, "cu_seqlens has dtype"),
    "cu-start": (packed(cu_seqlens=ints(1, 3, 6)), ValueError, "must start at 0"),
    "cu-end": (packed(cu_seqlens=ints(0, 3, 5)), ValueError, "must start at 0"),
    "cu-order": (packed(cu_seqlens=ints(0, 7, 6)), ValueError, "must start at 0"),
    "cu-states": (packed(cu_seqlens=ints(0, 1, 2, 6)), ValueError, r"\[S, N, D\] = \[3, 2, 8\]"),
    "cu-lengths": (packed(cu_seqlens=ints(0, 6), lengths=ints(6)), ValueError, "only one may be"),
    "clip-negative": (changed(grad_clip=-1.0), ValueError, "grad_clip is -1.0"),
    "clip-nan": (changed(grad_clip=float("nan")), ValueError, "grad_clip is nan"),
    "clip-text": (changed(grad_clip="1"), TypeError, "grad_clip is a str, but must be None or a"),
    "clip-flag": (changed(grad_clip=True), TypeError, "grad_clip is a bool, but must be None or a"),
    "precision": (changed(precision="high"), ValueError, "precision is 'high', but must be one of"),
    "save": (changed(save="all"), ValueError, "save is 'all', but must be one of"),
    "backend": (changed(backend="gpu"), ValueError, "backend is 'gpu', but must be one of"),
    "backend-other": (changed(backend=OTHER), ValueError, f"but the tensors are on '{DEVICE}'"),
}


@pytest.fixture(params=["kernel", "reference"])
def entry(request):
    """Both entry points give the same errors: the Hub's binary and the torch reference."""
    return request.getfixturevalue("fused_rnn") if request.param == "kernel" else reference


@pytest.mark.parametrize("row", TABLE)
def test_sequence(entry, row):
    call, error, message = TABLE[row]
    with pytest.raises(error, match=message):
        entry.lstm(**call)


def test_cell_name(entry):
    with pytest.raises(ValueError, match="cell is 'ltsm', but must be one of lstm, gru"):
        entry.recurrent("ltsm", **base())
    with pytest.raises(ValueError, match="nonlinearity is 'gelu', but must be one of tanh, relu"):
        entry.rnn(torch.randn(1, 1, 1, 1, 1), torch.randn(1, 1, 1, 1), nonlinearity="gelu")


def test_step(entry):
    call = base()
    x, weight = call["x"], call["weight"]
    with pytest.raises(
        ValueError, match=r"x has shape \[2, 4, 4, 2, 8\], but must be \[B, G, N, D\]"
    ):
        entry.lstm_step(x, weight)
    with pytest.raises(ValueError, match=r"state\[0\] has shape \[1, 2, 8\]"):
        entry.lstm_step(x[:, 0], weight, None, tuple(s[:1] for s in call["state"]))


def test_linear(entry):
    x, w = torch.randn(3, 8), torch.randn(5, 7)
    with pytest.raises(ValueError, match=r"weight has shape \[5, 7\], but must be \[O, I\]"):
        entry.linear(x, w)
    with pytest.raises(ValueError, match=r"bias has shape \[4\], but must be \[O\] = \[5\]"):
        entry.linear(x[:, :7], w, torch.randn(4))
    with pytest.raises(TypeError, match="weight has dtype"):  # int8 weights have no scale here
        entry.linear(x[:, :7], w.to(torch.int8))
    with pytest.raises(TypeError, match="bias has dtype"):
        entry.linear(x[:, :7], w, torch.ones(5).int())


def test_backend_by_name_is_never_replaced():
    with pytest.raises(RuntimeError, match="this copy of the kernel holds no binary"):
        reference.lstm(**base(), backend=DEVICE)


def test_ops_called_directly_are_safe(fused_rnn):
    """torch.ops is an entry point too: wrong shapes raise there instead of reading out of bounds."""
    fwd = fused_rnn.dispatch.ops.lstm_fwd
    call = base()
    x, weight = call["x"], call["weight"]
    rest = (None, None, None, None, None, None, None, False)
    for bad_x, bad_weight in ((x[0], weight), (x, weight[:, :1]), (x[:, :, :2], weight)):
        with pytest.raises(RuntimeError, match=r"x|weight"):
            fwd(bad_x, bad_weight, *rest)
    with pytest.raises(RuntimeError, match=r"dtype|weight"):
        fwd(x, weight.double(), *rest)
    with pytest.raises(RuntimeError, match="lengths"):
        fwd(x, weight, None, None, None, None, ints(1, 9), None, None, False)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        fwd(x[:1], weight, None, None, None, None, None, ints(0, 9, 4), None, False)
    with pytest.raises(RuntimeError, match="state"):
        fwd(x, weight, None, torch.zeros(2, B, N, D + 1), *rest[2:])
