"""Tests decoding with a ring of the last steps (tfla's replay.py) against decoding without one, in
float64."""

import pytest
import torch

from flashcell.kernels import tfla
from mlstm_cases import CELLS, Case, make, unscaled
from numerics import assert_bitwise, assert_close

EXACT = 1e-13  # float64, sums of a few dozen terms in another order; observed 4e-15


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def options_of(call):
    return {k: call[k] for k in ("input_gate", "normalize") if k in call}


def steps_of(call, T):
    """Yields the arguments of each step."""
    rest = {k: call[k] for k in ("eps", "norm", "norm_weight") if k in call} | options_of(call)
    for t in range(T):
        given = {k: call[k][:, t].clone() for k in ("q", "k", "v", "i", "f")}
        gate = {"out_gate": call["out_gate"][:, t]} if "out_gate" in call else {}
        yield given | gate | rest


def clone(tensors):
    return tuple(t.clone() for t in tensors)


def start(call, steps, dtype=torch.float64):
    state = clone(call["state"])
    return state, tfla.mlstm_ring(state[0], dtype, steps)


def assert_same_state(name, got, want):
    for s, (a, b) in enumerate(zip(unscaled(got), unscaled(want), strict=True)):
        assert_close(f"{name}, state {s}", a, b, EXACT)


@pytest.mark.parametrize("i", [-10.0, 0.0, 10.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 16])
def test_replayed_steps_are_the_steps(cell, steps, i):
    """h of every step; the state on which it falls when folded; what the state holds meanwhile."""
    T = 20
    call = make(cell, Case(3, T, 2, 16, 24, ("state", "layer", "eps"), i=i), torch.float64)
    want, (state, ring) = clone(call["state"]), start(call, steps)
    for t, given in enumerate(steps_of(call, T)):
        before = clone(state)
        exact, want = tfla.mlstm_step(**given, state=want)
        h = tfla.mlstm_replay_step(**given, state=state, ring=ring)
        assert_close(f"h of step {t}", h, exact, EXACT)
        assert torch.equal(ring.used, torch.full_like(ring.used, t % steps + 1))
        if t % steps:  # nothing but the ring was written
            for a, b in zip(state, before, strict=True):
                assert_bitwise("state", a, b)
        copies = clone(state), tfla.Ring(*clone(ring))
        folded = tfla.mlstm_fold(*copies, **options_of(call))
        assert folded[0] is copies[0][0]
        assert not copies[1].used.any()
        assert_same_state(f"step {t}", folded, want)


def test_rows_at_different_entries(cell):
    """Rows that began at different times each fold when their own ring is full."""
    T, begins = 12, (0, 1, 3)
    call = make(cell, Case(3, T, 2, 8, 8, ("state",)), torch.float64)
    want, (state, ring) = clone(call["state"]), start(call, 4)
    for t, given in enumerate(steps_of(call, T)):
        for row, begin in enumerate(begins):
            if t == begin:  # a new sequence takes the row
                for s in (*want, *state):
                    s[row] = s.roll(1, 0)[row]
                want = tuple(s.clone() for s in want)
                for a, b in zip(state, want, strict=True):
                    a[row] = b[row]
                ring.used[row] = 0
        exact, want = tfla.mlstm_step(**given, state=want)
        h = tfla.mlstm_replay_step(**given, state=state, ring=ring)
        assert_close(f"h of step {t}", h, exact, EXACT)
    assert ring.used[:, 0].tolist() == [(T - begin - 1) % 4 + 1 for begin in begins]
    row = slice(1, 2)
    part = [s[row] for s in state], tfla.Ring(*(x[row] for x in ring))
    tfla.mlstm_fold(*part, **options_of(call))
    assert ring.used[:, 0].tolist()[1] == 0
    assert ring.used[0, 0] > 0
    assert_same_state("row 1", [s[row] for s in state], [s[row] for s in want])


def test_steps_are_taken_back(cell):
    call = make(cell, Case(2, 9, 2, 8, 16, ("state",)), torch.float64)
    steps = list(steps_of(call, 9))
    want, (state, ring) = clone(call["state"]), start(call, 4)
    for given in steps[:5]:
        _, want = tfla.mlstm_step(**given, state=want)
    for given in (*steps[:5], steps[8], steps[7]):
        tfla.mlstm_replay_step(**given, state=state, ring=ring)
    ring.used.sub_(2)
    for given in steps[5:]:
        exact, want = tfla.mlstm_step(**given, state=want)
        h = tfla.mlstm_replay_step(**given, state=state, ring=ring)
        assert_close("h", h, exact, EXACT)


def test_extreme_gates(cell):
    """Shut and open gates, and steps that nothing of the state survives."""
    call = make(cell, Case(2, 12, 2, 8, 8, ("state",)), torch.float64)
    call["f"][:, 3], call["f"][:, 7] = -3000.0, 400.0
    call["i"][0, 5], call["i"][1, 5], call["i"][:, 9] = -2000.0, 300.0, -(2.0**101)
    want, (state, ring) = clone(call["state"]), start(call, 5)
    for t, given in enumerate(steps_of(call, 12)):
        exact, want = tfla.mlstm_step(**given, state=want)
        h = tfla.mlstm_replay_step(**given, state=state, ring=ring)
        assert_close(f"h of step {t}", h, exact, EXACT)


def wrong_rings(ring):
    yield ring[:4], "ring is 4 tensors, but a ring needs a tuple of 5"
    yield (
        ring._replace(k=ring.k[:, :, :0]),
        r"ring\[0\] has shape .*, but must be \[B, H, R, K\], R",
    )
    yield ring._replace(v=ring.v[..., :8]), r"ring\[1\] has shape \[2, 2, 4, 8\], but must be"
    yield ring._replace(i=ring.i.float()), r"ring\[2\] has dtype torch.float32, but must be"
    yield ring._replace(used=ring.used.long()), r"ring\[4\] has dtype torch.int64, but must be"
    yield ring._replace(f=ring.i), r"ring\[3\] shares memory with ring\[2\]"
    strided = ring.k.transpose(0, 1).contiguous().transpose(0, 1)
    yield ring._replace(k=strided), r"ring\[0\] has strides .*, but must be contiguous"


def test_wrong_rings_are_refused(cell):
    call = make(cell, Case(2, 1, 2, 8, 16, ("state",)), torch.float64)
    given = next(steps_of(call, 1))
    state, ring = start(call, 4)
    for wrong, message in wrong_rings(ring):
        with pytest.raises((TypeError, ValueError), match=message):
            tfla.mlstm_replay_step(**given, state=state, ring=wrong)
        with pytest.raises((TypeError, ValueError), match=r"ring|state\[0\] has shape"):
            tfla.mlstm_fold(state, wrong, **options_of(call))
    with pytest.raises(ValueError, match="state is None, but mlstm_replay_step needs"):
        tfla.mlstm_replay_step(**given, state=None, ring=ring)
    with pytest.raises(ValueError, match="q requires a gradient, but mlstm_replay_step is for"):
        tfla.mlstm_replay_step(**given | {"q": given["q"].requires_grad_()}, state=state, ring=ring)
    for steps in (0, 17, 2.0):
        with pytest.raises(ValueError, match=rf"steps is {steps}, but must be an int, 1 to 16"):
            tfla.mlstm_ring(state[0], torch.float64, steps)
