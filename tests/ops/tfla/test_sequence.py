"""Tests tfla's outputs and all gradients against the float64 reference, and the op contract."""

import itertools

import pytest
import torch

from cases import DEVICE, upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import CASES, CELLS, EMPTY, Case, leaves, make, names, nearby, normal, unscaled
from mlstm_peer import Peer
from numerics import assert_as_accurate, assert_bitwise, assert_close, rms, worst

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cuda":
    DTYPES.remove(torch.float64)  # float64 has the reference only
DOUBLE = DEVICE == "cpu"  # the kernel runs float64
EXACT = torch.float64 if DOUBLE else torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")
SMALL = Case(3, 45, 2, 24, 16, ("state", "reset", "hold"))
SEQUENCE = ("q", "k", "v", "i", "f", "out_gate")
short = lambda dtype: str(dtype)[6:]


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def run(kernel, call, upstream, **options):
    """Returns h, the last state without its scale, and the gradients of every floating input, by
    name."""
    call, sources = leaves(call)
    h, last = kernel.mlstm(**call, **options)
    outputs = (h, *unscaled(last)[:2])
    pairs = [
        (y, dy.to(y.dtype)) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad
    ]
    ys, dys = [y for y, _ in pairs], [dy for _, dy in pairs]
    grads = [torch.zeros_like(source) for source in sources.values()]
    if ys:
        grads = torch.autograd.grad(ys, list(sources.values()), dys, materialize_grads=True)
    named = {"h": h, **{f"last[{k}]": s for k, s in enumerate(unscaled(last))}}
    named.update({f"d{k}": g for k, g in zip(sources, grads, strict=True)})
    return {k: v.detach() for k, v in named.items()}


def upstream(call, dtype):
    """Returns random output gradients, representable in `dtype`."""
    h, last = reference.mlstm(**call)
    return [normal(h.shape, dtype), *(normal(s.shape) for s in last[:2])]


# The distance from float64, relative to the size of the tensor, besides four times what a nearly
# cancelling divisor does to the reference: its own error in that dtype or, in fp32, its change if
# inputs change by TERM. fp64: worst seen 1.8e-13. df is a difference of two sums; if nothing comes
# in (i -10), n's gradient is that of few rows whose divisor nearly cancels. bf16 rounds weights,
# states and their gradients as operands of products.
ROUNDINGS = {
    torch.float64: (1e-12, {}),
    torch.float32: (1e-5, {}),
    torch.float16: (2e-3, {"df": 4e-3}),
    torch.bfloat16: (6e-3, {"df": 2.5e-2, "dstate[1]": 1e-2}),
}

TERM = 2**-22  # relative error of an fp32 product that tensor cores compute as three of tf32


def moved(call, given, exact):
    """Returns by how much, by name, the exact answers change if every fp32 value changes by TERM."""
    near = run(reference, nearby(upcast(call), TERM), given)
    return {key: rms(near[key] - exact[key]) if exact[key].numel() else 0.0 for key in exact}


def assert_near(name, key, got, exact, near, dtype, single_step, lost=0.0):
    usual, special = ROUNDINGS[dtype]
    assert got.shape == exact.shape
    if got.numel() == 0:
        return
    # One step of one head has gradients that are exactly 0: their terms are of size one.
    scale = max(rms(exact), 1.0) if single_step else rms(exact)
    allowed = 4 * max(rms(near - exact), lost) + special.get(key, usual) * scale
    error = rms(got - exact)
    assert error <= allowed, (
        f"{name}: {error:.3g} > {allowed:.3g} ({scale:.3g}); {worst(got, exact)}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_exact_as_the_reference(tfla, cell, case, dtype):
    call = make(cell, case, dtype)
    given = upstream(call, dtype)
    got = run(tfla, call, given, backend=DEVICE)
    near = run(Peer, call, given)
    exact = run(reference, upcast(call), given)
    assert got.keys() == exact.keys()
    lost = moved(call, given, exact) if dtype == torch.float32 else {}
    fits = {key: bool(near[key].isfinite().all()) for key in near}  # fp16 ends at 65504
    for key in exact:
        if key.startswith("d") and not all(fits.values()):
            assert bool(got[key].isfinite().all()) == fits[key], f"{cell} {case} {key}"
            continue
        args = (got[key], exact[key], near[key], dtype, case.T == 1, lost.get(key, 0.0))
        assert_near(f"{cell} {case} {key}", key, *args)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty_sizes(tfla, cell, case):
    """B, T, H or the number of documents may be 0: shapes are right, and states pass through."""
    call = make(cell, case, torch.float32)
    given = upstream(call, torch.float32)
    got = run(tfla, call, given, backend=DEVICE)
    want = run(reference, call, given)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 16, 64, 100, 128, 256, 1024])
@pytest.mark.parametrize("i", [-10.0, 0.0, 10.0])
def test_chunk_sizes_agree(tfla, cell, size, i):
    """Any chunk size gives the step-by-step values and gradients, far from any power of two too."""
    case = Case(1, 300, 1, 24, 16, ("state", "reset"), None, i)
    call = make(cell, case, EXACT)
    call["reset"] = normal((1, 300)) < -2.33  # every hundredth step
    given = upstream(call, EXACT)
    want = run(reference, {**upcast(call), "chunk_size": 7}, given)
    got = run(tfla, {**call, "chunk_size": size}, given, backend=DEVICE)
    for key in want:
        assert_close(key, got[key].double(), want[key], 1e-11 if DOUBLE else 5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_whole_equals_parts_equals_steps(tfla, cell, dtype):
    call = make(cell, Case(2, 40, 2, 24, 16, ("state", "layer")), dtype)
    h, last = tfla.mlstm(**call)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
    call.pop("chunk_size")
    state = call.pop("state")
    for cuts in ([0, 13, 40], list(range(41))):
        carried, parts = state, []
        for a, b in itertools.pairwise(cuts):
            part = {k: call[k][:, a:b] for k in SEQUENCE}
            if b - a == 1:
                part = {k: v[:, 0] for k, v in part.items()}
                one, carried = tfla.mlstm_step(**{**call, **part}, state=carried)
                one = one[:, None]
            else:
                one, carried = tfla.mlstm(**{**call, **part}, state=carried)
            parts.append(one)
        assert_close("h", torch.cat(parts, 1).double(), h.double(), tolerance)
        for got, want in zip(unscaled(carried), unscaled(last), strict=True):
            assert got.dtype == torch.float32
            assert_close("state", got, want, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_step(tfla, cell, dtype):
    """Compares a single step with the reference, with and without a state, in place and not, and
    then with gradients."""
    case = Case(3, 1, 2, 40, 136, ("state", "layer"))
    call = make(cell, case, dtype)
    call.pop("chunk_size")
    call |= {k: call[k][:, 0] for k in SEQUENCE}
    for state in (call["state"], None):
        call["state"] = state
        exact_h, exact = reference.mlstm_step(
            **upcast({k: v for k, v in call.items() if v is not None})
        )
        peer_h, peer = reference.mlstm_step(**call)
        h, last = tfla.mlstm_step(**call, backend=DEVICE)
        assert_near("h", "h", h, exact_h, peer_h, dtype, True)
        for s, e, r in zip(unscaled(last), unscaled(exact), unscaled(peer), strict=True):
            assert_as_accurate("state", s, e, r, 2)
        if state is not None:
            own = tuple(s.clone() for s in state)
            same, returned = tfla.mlstm_step(**{**call, "state": own}, inplace=True)
            assert_bitwise("h", same, h)
            for a, b, c in zip(own, returned, last, strict=True):
                assert a is b
                assert_bitwise("state", a, c)
    q = call["q"].clone().requires_grad_()
    tfla.mlstm_step(**{**call, "q": q})[0].float().sum().backward()
    assert q.grad.dtype == dtype
    assert bool(q.grad.isfinite().all())


def test_documents_equal_separate_sequences(tfla, cell):
    """Bitwise: a document's chunks begin where it begins."""
    call = make(cell, Case(4, 21, 2, 24, 16, ("state", "cu")), torch.float32)
    h, last = tfla.mlstm(**call)
    for s, (a, b) in enumerate(itertools.pairwise(call.pop("cu_seqlens").tolist())):
        part = {k: call[k][:, a:b] for k in SEQUENCE[:5]}
        state = tuple(x[s : s + 1] for x in call["state"])
        alone, end = tfla.mlstm(**{**call, **part, "state": state})
        assert_bitwise(f"document {s}", h[:, a:b], alone)
        for got, want in zip(last, end, strict=True):
            assert_bitwise(f"state of {s}", got[s : s + 1], want)


def test_held_steps_keep_the_state_unrounded(tfla, cell):
    call = make(cell, Case(2, 30, 1, 8, 8, ("state",)), torch.bfloat16)
    h, last = tfla.mlstm(**call, hold=torch.ones(2, 30, dtype=torch.bool))
    assert not h.any()
    for got, given in zip(last, call["state"], strict=True):
        assert_bitwise("state", got, given)


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's threads")
def test_deterministic_and_independent_of_threads(tfla, cell):
    for case in (SMALL, Case(1, 200, 3, 64, 64, ("lengths",), 64)):
        call = make(cell, case, torch.float32)
        given = upstream(call, torch.float32)
        threads, results = torch.get_num_threads(), []
        try:
            for n in (1, 2, 2, 3):
                torch.set_num_threads(n)
                results.append(run(tfla, call, given))
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            for key, value in other.items():
                assert_bitwise(key, value, results[0][key])


def test_backward_twice_with_retain_graph(tfla, cell):
    call, sources = leaves(make(cell, SMALL, torch.float32))
    h, _ = tfla.mlstm(**call)
    first = torch.autograd.grad(h.sum(), sources["q"], retain_graph=True)[0]
    assert_bitwise("dq", torch.autograd.grad(h.sum(), sources["q"])[0], first)


def test_inputs_are_left_alone(tfla, cell):
    call = make(cell, SMALL, torch.float32)
    given = upstream(call, torch.float32)
    each = lambda c: [
        t for v in c.values() for t in (v if isinstance(v, tuple) else (v,)) if torch.is_tensor(t)
    ]
    copies = [t.clone() for t in each(call)]
    run(tfla, call, given)
    assert all(map(torch.equal, each(call), copies))


def test_gates_and_state_in_another_dtype(tfla, cell):
    """Gates are fp32 and activations bf16, as under autocast; gradients have their inputs' dtype."""
    call = make(cell, SMALL, torch.bfloat16)
    call |= {"i": call["i"].float(), "f": call["f"].float(), "v": call["v"].float()}
    call, sources = leaves(call)
    h, _ = tfla.mlstm(**call)
    assert h.dtype == torch.bfloat16
    h.float().sum().backward()
    assert all(t.grad.dtype == t.dtype for t in sources.values())


def test_long_sequence(tfla, cell):
    """3000 steps in many groups of chunks: errors do not grow, and df has no drift."""
    call = make(cell, Case(1, 3000, 1, 32, 64, ("state",), 16, f=6.0), torch.float32)
    given = upstream(call, torch.float32)
    got = run(tfla, call, given)
    exact = run(reference, {**upcast(call), "chunk_size": 64}, given)
    lost = moved({**call, "chunk_size": 64}, given, exact)
    for key in exact:
        tolerance = 2e-5 + 4 * lost[key] / rms(exact[key])
        assert_close(key, got[key].double(), exact[key], tolerance)


def test_shards_compose(tfla, cell):
    """The context-parallel functions with the binary: outputs, last state and all gradients."""
    call, named = leaves(make(cell, Case(2, 90, 2, 16, 24, ("state", "reset"), 16), EXACT))
    gate = names(cell)
    h, last = tfla.mlstm(**call)
    given = [normal(x.shape, x.dtype) for x in (h, *unscaled(last)[:2])]
    want = torch.autograd.grad((h, *unscaled(last)[:2]), list(named.values()), given)
    state, outputs = call["state"], []
    for a, b in ((0, 37), (37, 80), (80, 90)):
        part = {k: call[k][:, a:b] for k in ("q", "k", "v", "i", "f", "reset")}
        outputs.append(tfla.mlstm(**part, state=state, **gate)[0])
        del part["q"]
        state = tfla.mlstm_carry(state, tfla.mlstm_transfer(**part, **gate, backend=DEVICE))
    got_h = torch.cat(outputs, 1)
    assert_close("h", got_h, h, 1e-11 if DOUBLE else 1e-6)
    ys = (got_h, *unscaled(state)[:2])
    for name, got, want_grad in zip(
        named, torch.autograd.grad(ys, list(named.values()), given), want, strict=True
    ):
        assert_close(f"d{name}", got, want_grad, 1e-10 if DOUBLE else 2e-6)


def test_a_trace_made_without_gradients_trains(tfla):
    given = [*torch.randn(3, 2, 1, 8), *torch.randn(2, 2, 1)]
    step = lambda *given: tfla.mlstm_step(*given)[0]
    traced = torch.jit.trace(step, tuple(given), check_trace=False)
    leaves = [t.requires_grad_() for t in given]
    found, wanted = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (traced, step))
    torch.testing.assert_close(found, wanted)
