"""Tests the op contract beyond values: equal in parts, deterministic, reusable, rows independent."""

import itertools

import pytest
import torch

from cases import DEVICE, Case, make
from flashcell.kernels.fused_rnn import CELLS
from numerics import EPS, UNITS, UNITS_PER_SUM, assert_bitwise, assert_close
from ops.fused_rnn.test_sequence import run, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16]
CASE = Case(5, 9, 2, 24, ("state", "reset", "hold"))
# CUDA's engines depend on the size: the same sums in another order, a few units of fp32; in bf16 h
# is rounded to 2^-8, and a flipped rounding is fed back.
SAME_SUMS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def assert_same_sums(key, got, want, dtype):
    """Bitwise on the CPU: a sequence's sums do not depend on what else the call has."""
    if DEVICE == "cpu":
        assert_bitwise(key, got, want)
    else:
        assert_close(key, got, want, SAME_SUMS[dtype])


def assert_same_but_for_order(key, got, want, D, dtype=torch.float32):
    """On the CPU a call of one step adds the D terms of a sum in another order than a sequence."""
    roundings = UNITS[torch.float32] + UNITS_PER_SUM[torch.float32] * D**0.5
    cpu = roundings * EPS[torch.float32]
    assert_close(key, got, want, cpu if DEVICE == "cpu" else SAME_SUMS[dtype])


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("B", [3, 70])
def test_whole_equals_chunked(fused_rnn, name, B, dtype):
    call = make(CELLS[name], Case(B, 12, 2, 40, ("state",)), dtype)
    h, last = fused_rnn.recurrent(name, **call)
    assert torch.isfinite(h).all(), "rows that nobody wrote"
    x, weight, bias, state, parts = *(call[k] for k in ("x", "weight", "bias", "state")), []
    for a, b in itertools.pairwise([0, 5, 7, 12]):
        part, state = fused_rnn.recurrent(name, x[:, a:b], weight, bias, state)
        parts.append(part)
    assert_same_sums("h", torch.cat(parts, 1), h, dtype)
    for k, s in enumerate(state):
        assert s.dtype == torch.float32
        assert_same_sums(f"state[{k}]", s, last[k], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_a_step_continues_a_sequence(fused_rnn, name, dtype):
    """Each step starts from the state that the sequence has there, so that no rounding is fed back."""
    D = 40
    call = make(CELLS[name], Case(3, 12, 2, D, ("state",)), dtype)
    x, weight, bias, state = (call[k] for k in ("x", "weight", "bias", "state"))
    for t in range(2, 12):
        _, before = fused_rnn.recurrent(name, x[:, :t], weight, bias, state)
        h, after = fused_rnn.recurrent(name, x[:, : t + 1], weight, bias, state)
        got, states = fused_rnn.recurrent_step(name, x[:, t], weight, bias, before)
        for k, s in enumerate(states):
            assert s.dtype == torch.float32
            assert_same_but_for_order(f"state[{k}] of {t}", s, after[k], D, dtype)
        if DEVICE == "cpu":  # in bf16 a state may round either way, so h is compared by itself
            assert_bitwise(f"h of step {t}", got, states[0].to(dtype))
            assert_bitwise(f"h of {t}", h[:, t], after[0].to(dtype))
        else:
            assert_close(f"h of step {t}", got, h[:, t], SAME_SUMS[dtype])


def test_step_by_step_equals_whole(fused_rnn, name):
    call = make(CELLS[name], Case(3, 12, 2, 40, ("state",)), torch.float32)
    h, last = fused_rnn.recurrent(name, **call)
    x, weight, bias, state, parts = *(call[k] for k in ("x", "weight", "bias", "state")), []
    for t in range(12):
        part, state = fused_rnn.recurrent_step(name, x[:, t], weight, bias, state)
        parts.append(part)
    assert_same_but_for_order("h", torch.stack(parts, 1), h, 40)
    for k, s in enumerate(state):
        assert_same_but_for_order(f"state[{k}]", s, last[k], 40)


def test_state_is_carried_unrounded(fused_rnn):
    """With bf16 in and out, a state that bf16 cannot hold survives a held step bitwise."""
    call = make(CELLS["lstm"], Case(2, 3, 1, 8, ("state",)), torch.bfloat16)
    hold = torch.ones(2, 3, dtype=torch.bool)
    h, last = fused_rnn.lstm(**call, hold=hold)
    assert not h.any()
    for s, given in zip(last, call["state"], strict=True):
        assert_bitwise("state", s, given)


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's threads")
def test_deterministic_and_independent_of_threads(fused_rnn, name):
    for case in (CASE, Case(20, 4, 3, 70), Case(1, 6, 1, 300)):
        call = make(CELLS[name], case, torch.float32)
        dh, dlast = upstream(name, call, torch.float32)
        threads, results = torch.get_num_threads(), []
        try:
            for n in (1, 2, 2, 3):
                torch.set_num_threads(n)
                results.append(run(fused_rnn.recurrent, name, call, dh, dlast))
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            for key, value in other.items():
                assert_bitwise(key, value, results[0][key])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_recompute_gives_the_same_bits(fused_rnn, name, dtype):
    call = make(CELLS[name], CASE, dtype)
    dh, dlast = upstream(name, call, dtype)
    kept = run(fused_rnn.recurrent, name, call, dh, dlast, save="gates")
    again = run(fused_rnn.recurrent, name, call, dh, dlast, save="recompute")
    for key in kept:
        assert_bitwise(key, again[key], kept[key])


def test_backward_twice_with_retain_graph(fused_rnn, name):
    call = make(CELLS[name], CASE, torch.float32)
    x = call["x"].requires_grad_()
    h, _ = fused_rnn.recurrent(name, **call)
    first, = torch.autograd.grad(h.sum(), x, retain_graph=True)  # fmt: skip
    second, = torch.autograd.grad(h.sum(), x)  # fmt: skip
    assert_bitwise("dx", second, first)


def test_inputs_are_left_alone(fused_rnn, name):
    call = make(CELLS[name], CASE, torch.float32)
    copies = {k: [t.clone() for t in v] if k == "state" else v.clone() for k, v in call.items()}
    dh, dlast = upstream(name, call, torch.float32)
    run(fused_rnn.recurrent, name, call, dh, dlast)
    for key, value in call.items():
        given = value if key == "state" else [value]
        kept = copies[key] if key == "state" else [copies[key]]
        for a, b in zip(given, kept, strict=True):
            assert torch.equal(a, b), key


def test_nan_state_stays_in_its_row_and_reset_clears_it(fused_rnn, name):
    """A NaN state gives NaN in that sequence alone, and only until a reset."""
    call = make(CELLS[name], Case(3, 6, 1, 40, ("state",)), torch.float32)
    clean, _ = fused_rnn.recurrent(name, **call)
    for s in call["state"]:
        s[1] = float("nan")
    h, _ = fused_rnn.recurrent(name, **call)
    assert torch.equal(h[[0, 2]], clean[[0, 2]])
    if name != "rnn_relu":  # other tests compare max(NaN, 0) with the reference's
        assert h[1].isnan().any()
    reset = torch.zeros(3, 6, dtype=torch.bool)
    reset[1, 2] = True
    h, last = fused_rnn.recurrent(name, **call, reset=reset)
    assert torch.isfinite(h[1, 2:]).all()
    assert all(torch.isfinite(s[1]).all() for s in last)


def test_weights_in_another_dtype_get_gradients_in_their_own(fused_rnn, name):
    """Activations are bf16 and parameters fp32, as under autocast."""
    call = make(CELLS[name], CASE, torch.bfloat16)
    for k in ("weight", "bias"):
        call[k] = call[k].float().requires_grad_()
    h, _ = fused_rnn.recurrent(name, **call)
    assert h.dtype == torch.bfloat16
    h.float().sum().backward()
    assert call["weight"].grad.dtype == call["bias"].grad.dtype == torch.float32


def test_documents_equal_separate_sequences(fused_rnn, name):
    call = make(CELLS[name], Case(4, 6, 2, 24, ("state", "cu")), torch.float32)
    h, last = fused_rnn.recurrent(name, **call)
    cu = call["cu_seqlens"].tolist()
    for s, (a, b) in enumerate(itertools.pairwise(cu)):
        state = tuple(k[s : s + 1] for k in call["state"])
        alone, end = fused_rnn.recurrent(
            name, call["x"][:, a:b], call["weight"], call["bias"], state
        )
        ends = [(f"state[{k}] of {s}", last[k][s : s + 1], v) for k, v in enumerate(end)]
        for key, got, want in ((f"document {s}", h[:, a:b], alone), *ends):
            if b - a == 1:
                assert_same_but_for_order(key, got, want, 24)
            else:
                assert_same_sums(key, got, want, torch.float32)


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's own elsewhere")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(5, 29, 33, 65), (1, 1, 300, 70), (2, 3, 0, 4), (0, 2, 8, 8)])
def test_linear(fused_rnn, shape, dtype):
    """Value and gradients of F.linear, no further from float64 than torch itself, times two."""
    from numerics import assert_as_accurate

    B, T, I, O = shape
    x, w, b = torch.randn(B, T, I), torch.randn(O, I), torch.randn(O)
    dy = torch.randn(B, T, O).to(dtype)
    results = []
    for function, kind in (
        (fused_rnn.linear, dtype),
        (torch.nn.functional.linear, torch.float64),
        (torch.nn.functional.linear, dtype),
    ):
        given = [t.to(dtype).to(kind).requires_grad_() for t in (x, w, b)]
        y = function(*given)
        results.append([y.detach(), *torch.autograd.grad(y, given, dy.to(kind))])
    for key, got, exact, peer in zip(("y", "dx", "dweight", "dbias"), *results, strict=True):
        assert_as_accurate(key, got, exact, peer, terms=max(shape))
