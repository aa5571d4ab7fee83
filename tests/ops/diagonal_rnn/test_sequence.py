"""Tests diagonal-rnn's outputs and all gradients against the float64 reference, and the op
contract."""

import itertools

import pytest
import torch

from cases import DEVICE, Case, upcast, with_gradients
from diagonal_cases import CASES, EMPTY, WEIGHTS, leaves, make
from flashcell.kernels import diagonal_rnn as reference
from numerics import assert_as_accurate, assert_bitwise, assert_close

CELLS = reference.CELLS
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cuda":
    DTYPES.remove(torch.float64)  # float64 has the reference only
pytestmark = pytest.mark.usefixtures("poisoned")
CASE = Case(5, 9, 1, 40, ("state", "reset", "hold"))
short = lambda dtype: str(dtype)[6:]


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


def run(function, call, dh, dlast, **options):
    """Returns (h, states, gradients of every floating input) of one call, as named tensors."""
    call, sources = leaves(call)
    h, last = function(**call, **options)
    return with_gradients(h, last, sources, dh, dlast)


def upstream(name, call, dtype):
    """Returns random output gradients, representable in `dtype`."""
    B, T, _, D = call["x"].shape
    sequences = len(call["cu_seqlens"]) - 1 if "cu_seqlens" in call else B
    return torch.randn(B, T, D).to(dtype), torch.randn(CELLS[name].states, sequences, D)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_exact_as_the_reference(diagonal_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, backend=DEVICE)
    peer = run(getattr(reference, name), call, dh, dlast)
    exact = run(getattr(reference, name), upcast(call), dh, dlast)
    assert got.keys() == exact.keys()
    for key in exact:
        is_gradient = key.startswith("d")  # they read the states as rounded in h and `saved`
        of_all_steps = key in ("da", "dp", "dbias")
        terms = case.B * case.T if of_all_steps else case.T if is_gradient else 1
        rounded = (dtype, is_gradient) if is_gradient or DEVICE == "cuda" else None
        assert_as_accurate(f"{name} {case} {key}", got[key], exact[key], peer[key], terms, rounded)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty_sizes(diagonal_rnn, name, case):
    """B, T, D or the number of documents may be 0: shapes are right, and states pass through."""
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, backend=DEVICE)
    want = run(getattr(reference, name), call, dh, dlast)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_whole_equals_chunked_equals_step_by_step(diagonal_rnn, name, dtype):
    """Bitwise: a channel's arithmetic is the same, and the carried state is unrounded."""
    call = make(CELLS[name], Case(3, 12, 1, 40, ("state",)), dtype)
    function, step = getattr(diagonal_rnn, name), getattr(diagonal_rnn, f"{name}_step")
    h, last = function(**call)
    x, weights = call["x"], [call[k] for k in WEIGHTS if k in call]
    for cuts in ([0, 5, 12], list(range(13))):
        state, parts = call["state"], []
        for a, b in itertools.pairwise(cuts):
            if b - a == 1:
                part, state = step(x[:, a], *weights, state)
                part = part[:, None]
            else:
                part, state = function(x[:, a:b], *weights, state)
            parts.append(part)
        assert_bitwise("h", torch.cat(parts, 1), h)
        for k, s in enumerate(state):
            assert s.dtype == torch.float32
            assert_bitwise(f"state[{k}]", s, last[k])


def test_held_steps_keep_the_state_unrounded(diagonal_rnn, name):
    call = make(CELLS[name], Case(2, 3, 1, 8, ("state",)), torch.bfloat16)
    hold = torch.ones(2, 3, dtype=torch.bool)
    h, last = getattr(diagonal_rnn, name)(**call, hold=hold)
    assert not h.any()
    for s, given in zip(last, call["state"], strict=True):
        assert_bitwise("state", s, given)


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's threads")
def test_deterministic_and_independent_of_threads(diagonal_rnn, name):
    for case in (CASE, Case(20, 40, 1, 70), Case(1, 60, 1, 300), Case(3, 50, 1, 200, ("lengths",))):
        call = make(CELLS[name], case, torch.float32)
        dh, dlast = upstream(name, call, torch.float32)
        threads, results = torch.get_num_threads(), []
        try:
            for n in (1, 2, 2, 3):
                torch.set_num_threads(n)
                results.append(run(getattr(diagonal_rnn, name), call, dh, dlast))
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            for key, value in other.items():
                assert_bitwise(key, value, results[0][key])


def test_backward_twice_with_retain_graph(diagonal_rnn, name):
    call, sources = leaves(make(CELLS[name], CASE, torch.float32))
    h, _ = getattr(diagonal_rnn, name)(**call)
    first = torch.autograd.grad(h.sum(), sources["x"], retain_graph=True)[0]
    assert_bitwise("dx", torch.autograd.grad(h.sum(), sources["x"])[0], first)


def test_inputs_are_left_alone(diagonal_rnn, name):
    call = make(CELLS[name], CASE, torch.float32)
    each = lambda c: [t for v in c.values() for t in (v if isinstance(v, tuple) else (v,))]
    copies = [t.clone() for t in each(call)]
    run(getattr(diagonal_rnn, name), call, *upstream(name, call, torch.float32))
    assert all(map(torch.equal, each(call), copies))


def test_nan_state_stays_in_its_channel_and_reset_clears_it(diagonal_rnn, name):
    call = make(CELLS[name], Case(3, 6, 1, 40, ("state",)), torch.float32)
    clean, _ = getattr(diagonal_rnn, name)(**call)
    for s in call["state"]:
        s[1, 7] = float("nan")
    h, _ = getattr(diagonal_rnn, name)(**call)
    sick = torch.zeros(3, 40, dtype=torch.bool)
    sick[1, 7] = True
    assert torch.equal(h.isnan(), sick[:, None].expand_as(h))
    assert torch.equal(h[:, :, ~sick.any(0)], clean[:, :, ~sick.any(0)])
    reset = torch.zeros(3, 6, dtype=torch.bool)
    reset[1, 2] = True
    h, last = getattr(diagonal_rnn, name)(**call, reset=reset)
    assert torch.isfinite(h[1, 2:]).all()
    assert all(torch.isfinite(s).all() for s in last)


def test_weights_in_another_dtype_get_gradients_in_their_own(diagonal_rnn, name):
    """Activations are bf16 and parameters fp32, as under autocast, and the other way round."""
    for x_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        call = make(CELLS[name], CASE, x_dtype)
        call |= {k: call[k].to(dtype) for k in WEIGHTS if k in call}
        call, sources = leaves(call)
        h, _ = getattr(diagonal_rnn, name)(**call)
        assert h.dtype == x_dtype
        h.float().sum().backward()
        assert all(t.grad.dtype == t.dtype for t in sources.values())


def test_documents_equal_separate_sequences(diagonal_rnn, name):
    call = make(CELLS[name], Case(4, 6, 1, 24, ("state", "cu")), torch.float32)
    h, last = getattr(diagonal_rnn, name)(**call)
    weights = [call[k] for k in WEIGHTS if k in call]
    for s, (a, b) in enumerate(itertools.pairwise(call["cu_seqlens"].tolist())):
        state = tuple(k[s : s + 1] for k in call["state"])
        alone, end = getattr(diagonal_rnn, name)(call["x"][:, a:b], *weights, state)
        assert_bitwise(f"document {s}", h[:, a:b], alone)
        for k in range(CELLS[name].states):
            assert_bitwise(f"state[{k}] of {s}", last[k][s : s + 1], end[k])


def test_info_of_the_sequential_method(diagonal_rnn, name):
    call = make(CELLS[name], Case(2, 3, 1, 8), torch.float32)
    *_, info = getattr(diagonal_rnn, name)(**call, return_info=True, method="sequential")
    assert info.method == "sequential"
    assert (int(info.iterations), float(info.residual), int(info.finished)) == (0, 0.0, 0)
    assert info.iterations.dtype == info.finished.dtype == torch.int32


def test_long_sequence(diagonal_rnn, name):
    """Over 2000 steps, errors do not grow beyond the reference's own."""
    call = make(CELLS[name], Case(1, 2000, 1, 16, ("state",)), torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast)
    exact = run(getattr(reference, name), upcast(call), dh, dlast)
    for key in exact:
        assert_close(key, got[key].double(), exact[key], 2e-6)
