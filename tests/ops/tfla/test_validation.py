"""Tests that tfla's errors say what is wrong, and that its ops are fully registered and compile."""

import pytest
import torch

from cases import DEVICE, eager_and_compiled
from flashcell.kernels import tfla as reference
from mlstm_cases import CELLS, Case, leaves, make, names

B, T, H, K, V = 2, 4, 2, 8, 16
OTHER = "cuda" if DEVICE == "cpu" else "cpu"
OPTIONS = [("state", "reset", "hold"), ("state", "lengths"), ("state", "cu"), ()]


def base(cell="exp"):
    return make(cell, Case(B, T, H, K, V, ("state",), None), torch.float32)


def changed(**arguments):
    call = base()
    call.update({k: v(call) if callable(v) else v for k, v in arguments.items()})
    return call


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


TABLE = {  # id -> (arguments, error, message)
    "q-list": (changed(q=[1.0]), TypeError, "q is a list, but must be a tensor"),
    "k-rank": (
        changed(k=lambda c: c["k"][0]),
        ValueError,
        r"k has shape \[4, 2, 8\], but must be \[B, T, H, K\]",
    ),
    "q-shape": (
        changed(q=lambda c: c["q"][:, :2]),
        ValueError,
        r"q has shape \[2, 2, 2, 8\], but must be \[B, T, H, K\] = \[2, 4, 2, 8\]",
    ),
    "v-float": (changed(v=0.5), TypeError, "v is a float, but must be a tensor"),
    "i-int": (changed(i=lambda c: c["i"].int()), TypeError, "i has dtype torch.int32"),
    "v-heads": (changed(v=lambda c: c["v"][:, :, :1]), ValueError, r"must be \[B, T, H, V\]"),
    "k-int": (changed(k=lambda c: c["k"].int()), TypeError, "k has dtype torch.int32"),
    "width": (
        changed(q=torch.randn(B, T, H, 12), k=torch.randn(B, T, H, 12)),
        ValueError,
        "k has K = 12, but it must be a multiple of 8 up to 1024",
    ),
    "wide": (changed(v=torch.randn(B, T, H, 1032)), ValueError, "v has V = 1032"),
    "i-shape": (changed(i=torch.randn(B, T)), ValueError, r"must be \[B, T, H\] = \[2, 4, 2\]"),
    "f-device": (changed(f=torch.randn(B, T, H, device="meta")), ValueError, "f is on meta"),
    "gate": (
        changed(input_gate="tanh"),
        ValueError,
        "input_gate is 'tanh', but must be one of exp",
    ),
    "normalize": (changed(normalize="max"), ValueError, "normalize is 'max'"),
    "eps": (changed(eps=-1.0), ValueError, "eps is -1.0, but must be a number >= 0"),
    "eps-text": (changed(eps="1e-6"), TypeError, "eps is a str, but must be a number"),
    "normalizer-grad": (
        changed(normalizer_grad=None),
        TypeError,
        "normalizer_grad is a NoneType, but must be True or False",
    ),
    "chunk-flag": (changed(chunk_size=True), ValueError, "chunk_size is True, but must be None or"),
    "chunk": (
        changed(chunk_size=0),
        ValueError,
        "chunk_size is 0, but must be None or an int >= 1",
    ),
    "state-count": (
        changed(state=lambda c: c["state"][:2]),
        ValueError,
        "state is 2 tensors, but input_gate 'exp' needs a tuple of 3 tensors",
    ),
    "state-sigmoid": (changed(input_gate="sigmoid"), ValueError, "needs a tuple of 1 tensors"),
    "state-shape": (
        changed(state=lambda c: (c["state"][0][:1], *c["state"][1:])),
        ValueError,
        r"state\[0\] has shape \[1, 2, 8, 16\], but must be \[B, H, K, V\] = \[2, 2, 8, 16\]",
    ),
    "reset-shape": (
        changed(reset=torch.zeros(T, B).bool()),
        ValueError,
        r"reset has shape \[4, 2\]",
    ),
    "hold-float": (changed(hold=torch.zeros(B, T)), TypeError, "hold has dtype torch.float32"),
    "lengths-float": (changed(lengths=torch.ones(B)), TypeError, "lengths has dtype torch.float32"),
    "lengths-shape": (changed(lengths=ints(1)), ValueError, r"lengths has shape \[1\], but must"),
    "cu-and-lengths": (
        changed(lengths=ints(1, 2), cu_seqlens=ints(0, 4)),
        ValueError,
        "lengths and cu_seqlens are both given",
    ),
    "lengths-long": (changed(lengths=ints(1, 5)), ValueError, "lengths.*0..*4"),
    "cu-batch": (changed(cu_seqlens=ints(0, 4)), ValueError, "x has batch 2"),
    "norm": (changed(norm="batch"), ValueError, "norm is 'batch', but must be one of layer, rms"),
    "norm-weight": (
        changed(norm="rms", norm_weight=torch.ones(V)),
        ValueError,
        r"norm_weight has shape \[16\], but must be \[H, V\] = \[2, 16\]",
    ),
    "norm-none": (changed(norm_weight=torch.ones(H, V)), ValueError, "norm is None"),
    "norm-eps": (changed(norm="rms", norm_eps=-1.0), ValueError, "norm_eps is -1.0, but must be"),
    "out-gate": (changed(out_gate=torch.ones(B, T, H, K)), ValueError, "out_gate has shape"),
    "norm-eps-text": (changed(norm="rms", norm_eps="1"), TypeError, "norm_eps is a str, but must"),
    "norm-weight-list": (
        changed(norm="rms", norm_weight=[1.0]),
        TypeError,
        "norm_weight is a list",
    ),
    "out-gate-bool": (
        changed(out_gate=torch.ones(B, T, H, V).bool()),
        TypeError,
        "out_gate has dtype torch.bool",
    ),
    "backend": (changed(backend="gpu"), ValueError, "backend is 'gpu', but must be one of"),
    "backend-other": (changed(backend=OTHER), ValueError, f"but the tensors are on {DEVICE!r}"),
}


@pytest.fixture(params=["kernel", "reference"])
def entry(request):
    """Both entry points give the same errors: the Hub's binary and the torch reference."""
    return request.getfixturevalue("tfla") if request.param == "kernel" else reference


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


@pytest.mark.parametrize("row", TABLE)
def test_sequence(entry, row, monkeypatch):
    monkeypatch.setenv("FLASHCELL_CHECK", "1")  # checks values too, on CUDA
    call, error, message = TABLE[row]
    with pytest.raises(error, match=message):
        entry.mlstm(**call)


def step_call():
    call = base()
    del call["chunk_size"]
    return {**call, **{k: call[k][:, 0] for k in ("q", "k", "v", "i", "f")}}


def test_step(entry):
    call = step_call()
    with pytest.raises(ValueError, match=r"k has shape \[2, 4, 2, 8\], but must be \[B, H, K\]"):
        entry.mlstm_step(**{**call, "k": base()["k"]})
    with pytest.raises(ValueError, match="state is None, but inplace=True needs"):
        entry.mlstm_step(**{**call, "state": None}, inplace=True)
    C, *rest = call["state"]
    with pytest.raises(ValueError, match=r"state\[0\] is strided, but must be torch.float32 and"):
        entry.mlstm_step(**{**call, "state": (C.mT.contiguous().mT, *rest)}, inplace=True)
    with pytest.raises(ValueError, match="v requires a gradient, but inplace=True is for decoding"):
        entry.mlstm_step(**{**call, "v": call["v"].clone().requires_grad_()}, inplace=True)
    with pytest.raises(TypeError, match="inplace is a int, but must be True or False"):
        entry.mlstm_step(**call, inplace=1)
    gate = torch.ones(B, H, V, requires_grad=True)
    with pytest.raises(ValueError, match="out_gate requires a gradient, but inplace=True"):
        entry.mlstm_step(**call, out_gate=gate, inplace=True)
    with pytest.raises(ValueError, match=r"out_gate has shape \[2, 1, 2, 16\]"):
        entry.mlstm_step(**call, out_gate=gate.detach()[:, None])


def test_transfers(entry):
    """A state of another batch size or kind of gate is refused, and not broadcast or cut."""
    call, carry, compose = base(), entry.mlstm_carry, entry.mlstm_compose
    given, state = [call[name] for name in ("k", "v", "i", "f")], call["state"]
    exp, sigmoid = (entry.mlstm_transfer(*given, input_gate=g) for g in ("exp", "sigmoid"))
    for message, function, *arguments in (
        ("state is NoneType, but transfer needs a tuple of 3", carry, None, exp),
        (r"state\[0\] has shape \[1, 2, 8, 16\]", carry, [s[:1] for s in state], exp),
        ("state is 3 tensors, but transfer needs a tuple of 1", carry, state, sigmoid),
        ("transfer is NoneType, but", carry, state, None),
        ("first is 3 tensors, but second needs a tuple of 1", compose, exp, sigmoid),
        ("first is 1 tensors, but second needs a tuple of 3", compose, sigmoid, exp),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def test_backend_by_name_is_never_replaced():
    with pytest.raises(RuntimeError, match="this copy of the kernel holds no binary"):
        reference.mlstm(**base(), backend=DEVICE)


def op_arguments(cell, options, steps=T):
    call, _ = leaves(make(cell, Case(B, steps, H, K, V, options), torch.float32))
    state = list(call.get("state", ()))
    spec = reference.CELLS[cell]
    C = state.pop(0) if state else None
    n = state.pop(0) if state and spec.normalized else None
    m = state.pop(0) if state else None
    masks = [call.get(k) for k in ("reset", "hold", "lengths", "cu_seqlens")]
    given = [call[k] for k in ("q", "k", "v", "i", "f")]
    return [*given, C, n, m, *masks, spec.exponential, spec.normalized, 0.0, True, 3]


@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck(tfla, cell, options):
    given = op_arguments(cell, options)
    op = tfla.dispatch.ops.mlstm_fwd.default
    torch.library.opcheck(op, given)
    torch.library.opcheck(op, [None, *given[1:]])  # without q, for the state only


def test_opcheck_step(tfla, cell):
    given = op_arguments(cell, ("state",))
    tensors = [t.detach()[:, 0] for t in given[:5]]
    state = [None if t is None else t.detach() for t in given[5:8]]
    out_gate, weight = torch.randn(B, H, V), torch.ones(H, V)
    for epilogue in ((None, None), (out_gate, None), (out_gate, weight)):
        norm = (epilogue[1] is not None, False, 1e-6)
        for op in (tfla.dispatch.ops.mlstm_step, tfla.dispatch.ops.mlstm_step_):
            torch.library.opcheck(op.default, [*tensors, *state, *epilogue, *given[12:15], *norm])


def test_total_is_what_divides_h(tfla, cell):
    given = [t.detach() if torch.is_tensor(t) else t for t in op_arguments(cell, ("state",))]
    _, _, n, _, total, *_ = tfla.dispatch.ops.mlstm_fwd(*given)
    if not reference.CELLS[cell].normalized:
        assert total.numel() == 0
        return
    want = (n * given[0][:, -1]).sum(-1) * K**-0.5
    torch.testing.assert_close(total[:, -1], want, rtol=1e-5, atol=1e-6)


def test_ops_called_directly_are_safe(tfla):
    """torch.ops is an entry point too: wrong shapes raise there instead of reading out of bounds."""
    q, k, v, i, f, *rest = (
        t.detach() if torch.is_tensor(t) else t for t in op_arguments("exp", ())
    )
    fwd = tfla.dispatch.ops.mlstm_fwd
    for bad in (
        (q[0], k, v, i, f),
        (q, k[..., :4], v, i, f),
        (q, k, v[:, :2], i, f),
        (q, k, v, i, f[:1]),
    ):
        with pytest.raises(RuntimeError, match="must"):
            fwd(*bad, *rest)
    with pytest.raises(RuntimeError, match="i must have dtype"):
        fwd(q, k, v, i.double(), f, *rest)
    with pytest.raises(RuntimeError, match="chunk_size must be at least 1"):
        fwd(q, k, v, i, f, *rest[:-1], 0)


@pytest.mark.skipif(DEVICE != "cpu", reason="fp64 is the CPU's")
@pytest.mark.parametrize("options", [("state", "reset", "hold"), ("state", "cu"), ("eps", "layer")])
def test_gradcheck(tfla, cell, options):
    if "eps" in options and cell == "exp":
        pytest.skip("with eps the choice of m is part of the equation, and m carries no gradient")
    call, sources = leaves(make(cell, Case(2, 5, 1, 8, 8, options, 3, f=1.0), torch.float64))

    def outputs(*_):
        h, last = tfla.mlstm(**call)
        if len(last) < 3:
            return (h, *last)
        scale = torch.exp(last[2])
        return h, last[0] * scale[..., None, None], last[1] * scale[..., None]

    assert torch.autograd.gradcheck(outputs, tuple(sources.values()), fast_mode=True)


def test_compiled_object(tfla, cell):
    """With fullgraph, forward and backward and a step in place give what eager gives."""
    case = Case(2, 9, 2, 16, 8, ("state", "reset", "layer"), 4)
    call, sources = leaves(make(cell, case, torch.float32))
    q, v = sources["q"], sources["v"]

    def model(q, v):
        h, last = tfla.mlstm(**{**call, "q": q * 2, "v": v})
        return h * last[0].sum()

    for eager, traced in zip(*eager_and_compiled(model, q, v), strict=True):
        torch.testing.assert_close(eager, traced, rtol=1e-6, atol=1e-6)

    step = {k: call[k].detach()[:, 0] for k in ("q", "k", "v", "i", "f")}
    decode = lambda state: tfla.mlstm_step(**step, **names(cell), state=state, inplace=True)[0]
    states = [tuple(s.detach().clone() for s in call["state"]) for _ in range(2)]
    with torch.no_grad():
        eager = decode(states[0])
        traced = torch.compile(decode, fullgraph=True, backend="aot_eager")(states[1])
    assert torch.equal(eager, traced)
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)
