"""Tests the clipping of states, and gradients that are cut from the recurrence."""

import itertools
from dataclasses import replace

import pytest
import torch

from cases import CASES, DEVICE, EMPTY, Case, make, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate, assert_bitwise, assert_close
from ops.fused_rnn.test_all_states import draw
from ops.fused_rnn.test_all_states import run as run_all_states
from ops.fused_rnn.test_sequence import CELLS, DTYPES, run, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
BOUNDED = [name for name, cell in CELLS.items() if cell.bounded]
CLIP = 0.25  # a power of two: the same in every dtype
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="a test of the CPU's code")
# The dtypes in which the kernels have gradients of clipped states.
WITH_GRADIENTS = DTYPES if DEVICE == "cpu" else [torch.float32]
short = lambda dtype: str(dtype)[6:]


def test_which_cells_have_a_bound():
    assert BOUNDED == ["lstm", "gru", "rnn_tanh", "rnn_relu"]


def plain_lstm(x, weight, state, most):
    """Runs an LSTM of one head step by step in torch, c clipped: TensorFlow's cell_clip."""
    (h, c), hs = state, []
    for t in range(x.shape[1]):
        pre = x[:, t] + torch.einsum("gnjk,bnk->bgnj", weight, h)
        i, f, g, o = pre.unbind(1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        c = torch.clamp(c, -most, most)
        h = torch.sigmoid(o) * torch.tanh(c)
        hs.append(h)
    return torch.stack(hs, 1), (h, c)


def test_the_reference_is_a_clamp():
    call = make(CELLS["lstm"], Case(3, 7, 1, 5, ("state", "nobias")), torch.float64)
    x, weight = call["x"].requires_grad_(), call["weight"].requires_grad_()
    state = tuple(s.requires_grad_() for s in call["state"])
    inputs = [x, weight, *state]
    want, ends = plain_lstm(x, weight, state, CLIP)
    got, last = reference.lstm(x, weight, None, state, clip_state=CLIP)
    torch.testing.assert_close((got, last), (want, ends), rtol=1e-12, atol=1e-12)
    assert (ends[1].abs() == CLIP).any()
    assert (ends[1].abs() < CLIP).any()
    first = torch.autograd.grad(want.square().sum(), inputs)
    second = torch.autograd.grad(got.square().sum(), inputs)
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("save", ["gates", "recompute"])
@pytest.mark.parametrize("dtype", WITH_GRADIENTS, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_kernel_is_as_exact_as_the_reference(fused_rnn, name, case, dtype, save):
    call = make(CELLS[name], case, dtype) | {"clip_state": CLIP}
    dh, dlast = upstream(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE, save=save)
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    free = run(fused_rnn.recurrent, name, call | {"clip_state": None}, dh, dlast, backend=DEVICE)
    assert not torch.equal(got["h"], free["h"])
    for key in exact:
        assert_as_accurate(f"{name} {case} {key}", got[key], exact[key], peer[key], case.D)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_inference_in_16_bits(fused_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype) | {"clip_state": CLIP}
    on_cuda = (dtype, False) if DEVICE == "cuda" else None
    h, last = fused_rnn.recurrent(name, **call, backend=DEVICE)
    peer, peer_last = reference.recurrent(name, **call)
    exact, exact_last = reference.recurrent(name, **upcast(call))
    free, _ = fused_rnn.recurrent(name, **call | {"clip_state": None}, backend=DEVICE)
    assert not torch.equal(h, free)
    for got, right, other in zip((h, *last), (exact, *exact_last), (peer, *peer_last), strict=True):
        assert_as_accurate(f"{name} {case}", got, right, other, case.D, on_cuda)


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_empty_sizes(fused_rnn, name, case):
    call = make(CELLS[name], case, torch.float32) | {"clip_state": CLIP}
    dh, dlast = upstream(name, call, torch.float32)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    want = run(reference.recurrent, name, call, dh, dlast)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", WITH_GRADIENTS, ids=short)
@pytest.mark.parametrize("case", [c for c in CASES if "clip" not in c.options], ids=str)
def test_gradients_by_way_of_all_states(fused_rnn, case, dtype):
    call = make(CELLS["lstm"], case, dtype) | {"clip_state": CLIP}
    given = draw("lstm", call, dtype)
    got = run_all_states(fused_rnn.recurrent, "lstm", call, given, backend=DEVICE)
    peer = run_all_states(reference.recurrent, "lstm", call, given)
    exact = run_all_states(reference.recurrent, "lstm", upcast(call), given)
    assert got["states[1]"].abs().max() <= CLIP
    for key in exact:
        terms = max(case.D, case.B * case.T) if key in ("dweight", "dbias") else case.D
        on_cuda = (dtype, True) if key.startswith("d") else None  # a 16-bit dh is rounded once more
        assert_as_accurate(f"{case} {key}", got[key], exact[key], peer[key], terms, on_cuda)


@pytest.mark.parametrize("name", BOUNDED)
def test_whole_equals_step_by_step(fused_rnn, name):
    call = make(CELLS[name], Case(3, 6, 2, 24, ("state",)), torch.float32) | {"clip_state": CLIP}
    h, last = fused_rnn.recurrent(name, **call)
    x, state = call.pop("x"), call.pop("state")
    for t in range(6):
        part, state = fused_rnn.recurrent_step(name, x[:, t], state=state, **call)
        torch.testing.assert_close(part, h[:, t], rtol=1e-5, atol=1e-6)
    for one, other in zip(state, last, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_wide_bound_changes_nothing(fused_rnn, name):
    call = make(CELLS[name], Case(3, 7, 2, 24, ("state",)), torch.float32)
    given = upstream(name, call, torch.float32)
    want = run(fused_rnn.recurrent, name, call, *given)
    for bound in (1e30, float("inf"), 10**6):
        got = run(fused_rnn.recurrent, name, call | {"clip_state": bound}, *given)
        for key, value in want.items():
            if DEVICE == "cpu":
                assert_bitwise(key, got[key], value)
            else:
                torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-3)


def test_a_nan_is_not_clipped(fused_rnn):
    call = make(CELLS["lstm"], Case(2, 4, 1, 8, ("state",)), torch.float32) | {"clip_state": CLIP}
    call["state"][1][0, 0, 3] = float("nan")
    _, (_, c) = fused_rnn.lstm(**call)
    assert c[0, 0].isnan().all()  # by way of the recurrent product
    assert not c[1].isnan().any()


def test_compiled(fused_rnn):
    call = make(CELLS["lstm"], Case(2, 5, 1, 8, ("state", "reset")), torch.float32)

    def loss(x, weight):
        h, (_, c) = fused_rnn.lstm(**{**call, "x": x, "weight": weight}, clip_state=CLIP)
        return h.square().sum() + c.square().sum()

    def gradients(function):
        inputs = [call[k].clone().requires_grad_() for k in ("x", "weight")]
        return torch.autograd.grad(function(*inputs), inputs)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(loss), rtol=1e-5, atol=1e-5)


@on_the_cpu
def test_opcheck(fused_rnn):
    call = make(CELLS["gru"], Case(2, 5, 2, 8), torch.float32)
    x, weight = call["x"].requires_grad_(), call["weight"].requires_grad_()
    bias, no_masks = call["bias"].requires_grad_(), (None,) * 4
    op = fused_rnn.dispatch.ops.gru_fwd.default
    torch.library.opcheck(op, (x, weight, bias, None, *no_masks, None, False, True, CLIP))


@on_the_cpu
def test_second_derivatives_are_refused(fused_rnn):
    call = make(CELLS["lstm"], Case(1, 3, 1, 4), torch.float32)
    x = call["x"].requires_grad_()
    h, _ = fused_rnn.lstm(x, call["weight"], clip_state=CLIP)
    (dx,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"clip_state is 0\.25, but must be None.*'reference'"):
        dx.sum().backward()


def test_what_is_refused(fused_rnn):
    call = make(CELLS["lstm"], Case(1, 3, 1, 4), torch.float32)
    for bound in (0, 0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"clip_state is .*, but must be None or a number > 0"):
            fused_rnn.lstm(**call, clip_state=bound)
    with pytest.raises(TypeError, match=r"clip_state is a str, but must be None or a number > 0"):
        fused_rnn.lstm(**call, clip_state="1")
    with pytest.raises(ValueError, match=r"clip_state is 1\.0, but must be None for slstm"):
        fused_rnn.slstm(**call, clip_state=1.0)
    with pytest.raises(ValueError, match=r"clip_state is 1\.0, but must be None for slstm"):
        fused_rnn.recurrent_step("slstm", call["x"][:, 0], call["weight"], clip_state=1.0)
    if DEVICE == "cuda":
        half = make(CELLS["lstm"], Case(1, 3, 1, 4), torch.float16)
        half["x"].requires_grad_()
        with pytest.raises(ValueError, match=r"clip_state is 1\.0, but must be None with backend="):
            fused_rnn.lstm(**half, clip_state=1.0, backend="cuda")
        with pytest.warns(RuntimeWarning, match="no gradients of clipped states in 16 bits"):
            fused_rnn.lstm(**half, clip_state=1.0)


def test_the_op_refuses_what_the_engine_has_not(fused_rnn):
    call = make(CELLS["slstm"], Case(1, 3, 1, 4), torch.float32)
    given = call["x"], call["weight"], None, None, *(None,) * 4, None, False, False
    with pytest.raises(RuntimeError, match="clip_state must be None for slstm, got 1"):
        fused_rnn.dispatch.ops.slstm_fwd(*given, 1.0)
    with pytest.raises(RuntimeError, match="clip_state must be"):
        fused_rnn.dispatch.ops.lstm_fwd(*given, 0.0)
    if DEVICE == "cuda":
        half = [t.half() if isinstance(t, torch.Tensor) else t for t in given[:2]]
        given = *half, *given[2:10], True  # saves
        h, _, saved, h_prev = fused_rnn.dispatch.ops.lstm_fwd(*given, 1.0)
        with pytest.raises(
            RuntimeError, match="clip_state must be None where saved values have 16"
        ):
            fused_rnn.dispatch.ops.lstm_bwd(
                h, None, saved, h_prev, half[1], *(None,) * 5, False, True, 1.0
            )


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
@pytest.mark.parametrize("engine", ["block", "cluster", "grid", "gemm", "fma", "batch", "wide"])
def test_engines_without_a_bound_refuse(fused_rnn, engine, monkeypatch):
    call = make(CELLS["lstm"], Case(3, 4, 1, 64), torch.float32)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    with pytest.raises(RuntimeError, match=f"is {engine}, but must be step where states are clip"):
        fused_rnn.lstm(**call, clip_state=1.0)


@pytest.mark.parametrize("precision", ["highest", "tf32"])
@pytest.mark.parametrize("name", BOUNDED)
def test_many_sequences_of_many_units(fused_rnn, name, precision):
    call = make(CELLS[name], Case(300, 3, 1, 520, ("state",)), torch.float32) | {"clip_state": CLIP}
    with torch.no_grad():
        h, last = fused_rnn.recurrent(name, **call, precision=precision, backend=DEVICE)
        exact, exact_last = reference.recurrent(name, **upcast(call))
    assert last[-1].abs().max() <= CLIP
    for got, want in zip((h, *last), (exact, *exact_last), strict=True):
        assert_close(name, got, want, 2e-3 if (precision, DEVICE) == ("tf32", "cuda") else 1e-6)


CUT = [
    Case(3, 7, 2, 5, ("state",)),
    Case(1, 1, 1, 1),
    Case(2, 1, 3, 16, ("state",)),
    Case(70, 3, 1, 5, ("state", "lengths")),
    Case(5, 11, 2, 24, ("state", "reset", "hold")),
    Case(5, 11, 2, 24, ("state", "cu", "reset", "hold")),
    Case(5, 11, 2, 24, ("state", "lengths", "reset", "hold")),
    Case(4, 12, 4, 64),
    Case(1, 3, 1, 520, ("state",)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", [replace(c, options=(*c.options, "cut")) for c in CUT], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_a_cut_gradient_is_the_references(fused_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    for key in exact:
        on_cuda = (dtype, key.startswith("d")) if DEVICE == "cuda" else None
        assert_as_accurate(f"{name} {case} {key}", got[key], exact[key], peer[key], case.D, on_cuda)


@on_the_cpu
@pytest.mark.parametrize("name", CELLS)
def test_a_cut_backward_has_no_product(fused_rnn, name):
    """It does not read the weight."""
    call = make(CELLS[name], Case(3, 5, 2, 24, ("state", "cut")), torch.float32)
    given = call["x"], call["weight"], call["bias"], torch.stack(call["state"]), *(None,) * 4
    ops = fused_rnn.dispatch.ops
    _, _, saved, h_prev = getattr(ops, f"{name}_fwd")(*given, 0.0, False, True)
    backward, results = getattr(ops, f"{name}_bwd"), []
    for weight in (call["weight"], torch.full_like(call["weight"], float("nan"))):
        given = torch.ones_like(h_prev), None, saved, h_prev, weight, *(None,) * 4
        results.append(backward(*given, 0.0, False, True))
    for one, other in zip(*results, strict=True):
        assert_bitwise(name, one, other)
    assert backward(*given, 1.0, False, True)[0].isnan().any()


@on_the_cpu
def test_a_cut_gradient_is_the_same_for_any_number_of_threads(fused_rnn):
    for case in (Case(17, 9, 1, 200, ("cut", "state")), Case(3, 40, 4, 130, ("cut", "lengths"))):
        call = make(CELLS["lstm"], case, torch.float32)
        given, results, threads = upstream("lstm", call, torch.float32), [], torch.get_num_threads()
        try:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                results.append(run(fused_rnn.recurrent, "lstm", call, *given))
        finally:
            torch.set_num_threads(threads)
        for one, other in itertools.pairwise(results):
            for key, value in one.items():
                assert_bitwise(key, other[key], value)
