"""Tests tfla's epilogue (norm, weight and output gate of h) and its gradients against float64."""

import pytest
import torch

from cases import DEVICE
from flashcell.kernels import tfla as reference
from mlstm_cases import CELLS, Case, make, names
from numerics import assert_as_accurate, assert_bitwise, assert_close
from ops.tfla.test_sequence import DTYPES, short

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3
PARTS = [
    ("layer", "gate", "weight"),
    ("rms", "gate", "weight"),
    ("layer", "gate"),
    ("rms", "weight"),
    ("layer",),
    ("gate",),
]
# Vectors that fill no warp and several; more rows than are added up at a time.
SIZES = [
    (1, 1, 1, 8),
    (2, 3, 2, 40),
    (1, 5, 2, 264),
    (1, 4, 1, 520),
    (2, 2, 1, 1024),
    (3, 171, 2, 24),
]

WIDTHS = [8, 136, 1024]


def draw(parts, size, dtype):
    """Draws h with a mean and with rows of zeros, as held steps have; the gate is a slice of a
    wider tensor."""
    *rows, H, V = size
    h = torch.randn(size, dtype=torch.float64) + torch.randn(*rows, H, 1, dtype=torch.float64)
    h[-1, -1] = 0
    given = {"h": h, "dy": torch.randn(size, dtype=torch.float64)}
    if "gate" in parts:
        given["out_gate"] = (3 * torch.randn(*rows, H, V + 3, dtype=torch.float64)).to(dtype)[
            ..., :V
        ]
    if "weight" in parts:
        given["norm_weight"] = 1 + 0.3 * torch.randn(H, V, dtype=torch.float64)
    return {k: v.to(dtype) for k, v in given.items()}


def run(kernel, given, parts, backend):
    """Returns y and the gradients of every input, by name; the reference's y is rounded to h's
    dtype."""
    sources = {k: v.detach().requires_grad_() for k, v in given.items() if k != "dy"}
    h, norm = sources["h"], parts[0] if parts[0] != "gate" else None
    wide = h if backend != "reference" else h.to(reference.reference.state_dtype(h.dtype))
    rest = (sources.get("out_gate"), norm, sources.get("norm_weight"), EPS)
    y = kernel.functional.finish(backend, wide, h.dtype, *rest)
    grads = torch.autograd.grad(y, list(sources.values()), given["dy"].to(y.dtype))
    return {"y": y.detach(), **{f"d{k}": g for k, g in zip(sources, grads, strict=True)}}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_as_exact_as_the_reference(tfla, parts, size, dtype):
    given = draw(parts, size, dtype)
    got = run(tfla, given, parts, DEVICE)
    peer = run(reference, given, parts, "reference")
    exact = run(reference, {k: v.double() for k, v in given.items()}, parts, "reference")
    assert got.keys() == exact.keys()
    for key in exact:
        terms = given["h"].shape[:2].numel() if key == "dnorm_weight" else size[-1]
        assert_as_accurate(f"{parts} {size} {key}", got[key], exact[key], peer[key], terms)


def test_no_rows_add_nothing_to_the_weight(tfla):
    for B, T in ((2, 0), (0, 3)):
        weight = torch.ones(2, 8, requires_grad=True)
        h = torch.empty(B, T, 2, 8)
        y = tfla.functional.finish(DEVICE, h, h.dtype, None, "rms", weight, EPS)
        (dweight,) = torch.autograd.grad(y, weight, torch.empty_like(y))
        assert_bitwise("dnorm_weight", dweight, torch.zeros(2, 8))


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_the_same_bits_every_time(tfla, parts):
    given = draw(parts, (2, 700, 2, 136), torch.bfloat16)
    first, again = (run(tfla, given, parts, DEVICE) for _ in range(2))
    for key in first:
        assert_bitwise(key, again[key], first[key])


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's threads")
def test_independent_of_threads(tfla):
    given = draw(PARTS[0], (3, 700, 2, 136), torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(run(tfla, given, PARTS[0], DEVICE))
    finally:
        torch.set_num_threads(threads)
    for key in results[0]:
        assert_bitwise(key, results[1][key], results[0][key])
        assert_bitwise(key, results[2][key], results[0][key])


@pytest.mark.skipif(DEVICE != "cpu", reason="fp64 is the CPU's")
@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_gradcheck(tfla, parts):
    given = draw(parts, (1, 3, 2, 8), torch.float64)
    names = [k for k in given if k != "dy"]
    norm = parts[0] if parts[0] != "gate" else None

    def y(*values):
        own = dict(zip(names, values, strict=True))
        rest = (own.get("out_gate"), norm, own.get("norm_weight"), EPS)
        return tfla.functional.finish(DEVICE, own["h"], torch.float64, *rest)

    assert torch.autograd.gradcheck(y, tuple(given[k].requires_grad_() for k in names))


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_opcheck(tfla, parts):
    given = draw(parts, (2, 3, 2, 16), torch.float32)
    sources = [given.get(k) for k in ("h", "out_gate", "norm_weight")]
    options = (parts[0] != "gate", parts[0] == "layer", EPS)
    leaves = [t if t is None else t.detach().requires_grad_() for t in sources]
    torch.library.opcheck(tfla.dispatch.ops.mlstm_epilogue.default, (*leaves, *options))
    backward = (given["dy"], *sources, *options)
    torch.library.opcheck(
        tfla.dispatch.ops.mlstm_epilogue_bwd.default, backward, test_utils="test_schema"
    )
    torch.library.opcheck(
        tfla.dispatch.ops.mlstm_epilogue_bwd.default, backward, test_utils="test_faketensor"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("parts", PARTS, ids="-".join)
@pytest.mark.parametrize("V", WIDTHS)
def test_step(tfla, parts, cell, dtype, V):
    """A step's epilogue reads the unrounded h, and is closer to float64 than one after the step."""
    case = Case(3, 1, 2, 24, V, ("state",))
    step = {k: v for k, v in make(cell, case, dtype).items() if k != "chunk_size"}
    step |= {k: step[k][:, 0] for k in ("q", "k", "v", "i", "f")}
    extra = draw(parts, (3, 1, 2, V), dtype)
    step |= {"norm": parts[0] if parts[0] != "gate" else None, "norm_eps": EPS}
    if "gate" in parts:
        step["out_gate"] = extra["out_gate"][:, 0]
    if "weight" in parts:
        step["norm_weight"] = extra["norm_weight"]
    double = lambda v: v.double() if torch.is_tensor(v) else v
    wide = {k: tuple(map(double, v)) if k == "state" else double(v) for k, v in step.items()}
    h, last = tfla.mlstm_step(**step, backend=DEVICE)
    peer, _ = reference.mlstm_step(**step)
    exact, _ = reference.mlstm_step(**wide)
    assert_as_accurate(f"{cell} {parts}", h, exact, peer, 24)
    if "weight" in parts:  # a weight rounded to h's dtype is read as it is
        rounded = step["norm_weight"].to(dtype)
        same, want = (
            tfla.mlstm_step(**{**step, "norm_weight": w})[0]
            for w in (rounded, rounded.to(torch.promote_types(dtype, torch.float32)))
        )
        assert_bitwise("rounded weight", same, want)
    own = tuple(s.clone() for s in step["state"])
    same, _ = tfla.mlstm_step(**{**step, "state": own}, inplace=True)
    assert_bitwise("in place", same, h)
    plain, states = tfla.mlstm_step(
        **{k: step[k] for k in ("q", "k", "v", "i", "f", "state")}, **names(cell)
    )
    for got, want in zip(last, states, strict=True):
        assert_bitwise("state", got, want)
    assert plain.shape == h.shape


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradients_of_a_step(tfla, norm):
    """Only one of out_gate and norm_weight may need a gradient."""
    case = Case(2, 1, 2, 16, 24, ("state", norm))
    step = {k: v for k, v in make("exp", case, torch.float32).items() if k != "chunk_size"}
    step |= {k: step[k][:, 0] for k in ("q", "k", "v", "i", "f", "out_gate")}
    for name in ("out_gate", "norm_weight"):
        source = step[name].clone().requires_grad_()
        grads = []
        for kernel, backend in ((tfla, DEVICE), (reference, "reference")):
            h, _ = kernel.mlstm_step(**{**step, name: source}, backend=backend)
            grads.append(torch.autograd.grad(h.square().sum(), source)[0])
        assert_close(name, grads[0], grads[1].double(), 1e-5)


def test_gate_and_weight_in_another_dtype(tfla):
    """fp32 parameters beside bf16 activations: gradients are in their own dtype."""
    call = make("exp", Case(2, 20, 2, 16, 24, ("layer",)), torch.bfloat16)
    for name in ("norm_weight", "out_gate"):
        call[name] = call[name].float().requires_grad_()
    h, _ = tfla.mlstm(**call)
    assert h.dtype == torch.bfloat16
    h.float().sum().backward()
    assert all(call[k].grad.dtype == torch.float32 for k in ("norm_weight", "out_gate"))


def test_nothing_is_kept_of_the_norm(tfla):
    """The norm saves nothing of its own: its backward needs only h, the gate and the weight, which
    are saved anyway."""
    call = make("exp", Case(2, 20, 2, 16, 24, ("layer",)), torch.float32)
    call["out_gate"].requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tfla.mlstm(**call)
    assert len(kept) == 3
    assert {t.shape for t in kept} == {call["out_gate"].shape, call["norm_weight"].shape}


def test_bad_arguments_of_the_ops(tfla):
    given = draw(PARTS[0], (2, 3, 2, 16), torch.float32)
    op, options = tfla.dispatch.ops.mlstm_epilogue, (True, True, EPS)
    h, gate, weight = (given[k] for k in ("h", "out_gate", "norm_weight"))
    for arguments, message in (
        ((h[0], gate, weight, *options), r"h must be \[B, T, H, V\], got shape \[3, 2, 16\]"),
        ((h[..., :12], gate, weight, *options), "h must have a width that is a multiple of 8"),
        ((h.int(), gate, weight, *options), "h must be float32, float64, float16 or bfloat16"),
        ((h, gate[:1], weight, *options), r"out_gate must have shape \[2, 3, 2, 16\]"),
        ((h, gate.half(), weight, *options), "out_gate must have dtype Float, got Half"),
        ((h, gate, weight[:, :8], *options), r"norm_weight must have shape \[2, 16\]"),
        ((h, gate, weight.half(), *options), "norm_weight must have dtype Float, got Half"),
        ((h, gate, weight, False, False, EPS), "norm must be true where there is a norm_weight"),
        ((h, gate, weight, True, True, -1.0), "norm_eps must not be negative, got -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)
    with pytest.raises(RuntimeError, match=r"dy must have shape \[2, 3, 2, 16\]"):
        tfla.dispatch.ops.mlstm_epilogue_bwd(given["dy"][:1], h, gate, weight, *options)


@pytest.mark.parametrize("backend", [DEVICE, "reference"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_padding_stays_zero_without_eps(tfla, norm, backend):
    q, k, v = torch.randn(3, 2, 4, 1, 8)
    i, f = torch.randn(2, 2, 4, 1)
    weight = torch.ones(1, 8, requires_grad=True)
    options = {"norm": norm, "norm_weight": weight, "norm_eps": 0.0, "backend": backend}
    h, _ = tfla.mlstm(q, k, v, i, f, lengths=torch.tensor([2, 4]), **options)
    assert not h[0, 2:].any()
    (d,) = torch.autograd.grad(h.square().sum(), weight)
    assert h.isfinite().all()
    assert d.isfinite().all()
