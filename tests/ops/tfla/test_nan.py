"""Tests how far a NaN spreads in tfla, and what ends it."""

import pytest
import torch

from mlstm_cases import CELLS, Case, make, unscaled
from numerics import assert_close
from ops.tfla import test_held

pytestmark = pytest.mark.usefixtures("poisoned")
SEQUENCE = ("q", "k", "v", "i", "f")


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def test_nan_stays_in_its_head_and_after_its_chunk(tfla, cell):
    call = make(cell, Case(2, 70, 3, 16, 16, ("state",), 16), torch.float32)
    clean, _ = tfla.mlstm(**call)
    for name in ("k", "v"):
        sick = call[name].clone()
        sick[1, 40, 2] = float("nan")
        h, _ = tfla.mlstm(**{**call, name: sick})
        ill = torch.zeros(2, 70, 3, dtype=torch.bool)
        ill[1, 32:, 2] = True  # a product multiplies masked values by 0
        assert h[1, 40:, 2].isnan().all(), name
        assert torch.equal(h[~ill], clean[~ill])


@pytest.mark.parametrize("t", [0, 70, 200])
def test_reset_ends_a_state_that_is_nan(tfla, cell, t):
    """A reset empties all of the state, m too, in a chunk's first tile and in a later one."""
    call = make(cell, Case(1, 300, 1, 16, 16, ("state",), 256), torch.float32)
    call["state"] = tuple(torch.full_like(s, float("nan")) for s in call["state"])
    reset = torch.zeros(1, 300, dtype=torch.bool)
    reset[0, t] = True
    h, last = tfla.mlstm(**call, reset=reset)
    part = {k: call[k][:, t:] for k in SEQUENCE}
    want, end = tfla.mlstm(**{**call, **part, "state": None})
    assert h[:, :t].isnan().all()
    assert_close("h", h[:, t:], want, 1e-6)
    for got, exact in zip(unscaled(last), unscaled(end), strict=True):
        assert_close("state", got, exact, 1e-6)


@pytest.mark.parametrize("gate", ["i", "f"])
def test_a_gate_that_is_nan_spoils_the_state(tfla, cell, gate):
    for options in (("state",), ()):
        call = make(cell, Case(2, 1, 3, 16, 16, options), torch.float32)
        call[gate][1, 0, 2] = float("nan")
        call.pop("chunk_size")
        h, last = tfla.mlstm(**call)
        step, next_state = tfla.mlstm_step(**{**call, **{k: call[k][:, 0] for k in SEQUENCE}})
        for x in (h[:, 0], *last, step, *next_state):
            ill = x.isnan().reshape(2, 3, -1)
            assert ill[1, 2].all()
            assert ill.sum() == ill[1, 2].sum()


@pytest.mark.parametrize("t", [0, 80, 200])
def test_a_gate_that_is_nan_is_in_m_until_a_reset(tfla, t):
    """The NaN may be in a chunk's first tile or in a later one."""
    call = make("exp", Case(1, 300, 2, 16, 16, ("state",), 256), torch.float32)
    call["i"][0, t, 1] = float("nan")
    reset = torch.zeros(1, 300, dtype=torch.bool)
    for part in (t + 1, 300):
        given = {**call, **{k: call[k][:, :part] for k in SEQUENCE}}
        h, (_, _, m) = tfla.mlstm(**given)
        assert h[0, t:, 1].isnan().all()
        assert m.isnan().tolist() == [[False, True]]
    reset[0, t + 7] = True
    _, (_, _, m) = tfla.mlstm(**call, reset=reset)
    assert m.isfinite().all()


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_gate_that_is_nan_does_not_pass_a_reset(tfla, cell, gate, backend):
    """The reset is in the chunk of the NaN: in the same tile, or in a later one."""
    call = make(cell, Case(1, 150, 2, 16, 16, ("state",), 128), torch.float32)
    call[gate][0, 3] = float("nan")
    for t in (5, 90):
        reset = torch.zeros(1, 150, dtype=torch.bool)
        reset[0, t] = True
        h, last = tfla.mlstm(**call, reset=reset, backend=backend)
        part = {k: call[k][:, t:] for k in SEQUENCE}
        want, end = tfla.mlstm(**{**call, **part, "state": None}, backend=backend)
        assert h[:, 3:t].isnan().all()
        assert_close("h", h[:, t:], want, 1e-5)
        for got, exact in zip(unscaled(last), unscaled(end), strict=True):
            assert_close("state", got, exact, 1e-5)


def test_an_n_that_is_nan_spoils_h(tfla):
    for cell in ("exp", "sigmoid floor"):
        call = make(cell, Case(2, 3, 2, 16, 16, ("state",)), torch.float32)
        call["state"][1][0, 1, 3] = float("nan")
        call.pop("chunk_size")
        h, _ = tfla.mlstm(**call)
        step, _ = tfla.mlstm_step(**{**call, **{k: call[k][:, 0] for k in SEQUENCE}})
        for x in (*h.unbind(1), step):
            assert x.isnan().all(-1).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_input_gate_that_shuts_for_good(tfla, backend):
    """The exponential gate counts as -2^100 below that, also if nothing else was ever added."""
    call = make("exp", Case(1, 1, 2, 16, 16), torch.float32)
    call = {k: v for k, v in call.items() if k in SEQUENCE and k != "q"}
    for value in (-1e38, -float("inf")):
        i = torch.tensor([[[value, 0.5]]], requires_grad=True)
        C, n, m, _ = tfla.mlstm_transfer(**{**call, "i": i}, backend=backend)
        assert m.tolist() == [[-(2.0**100), 0.5]]
        assert_close("n", n, call["k"][:, 0], 1e-6)
        (grad,) = torch.autograd.grad(C.square().sum(), i)
        assert grad.ne(0).tolist() == [[[False, True]]]


def test_what_a_held_step_holds(tfla, cell):
    """The values of held steps do not matter, as in test_held.py, here for the emulator too."""
    for dtype in (torch.float32, torch.bfloat16):
        test_held.test_mlstm(tfla, (cell.split()[0], None), dtype, "auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_h_of_a_held_step_is_0_whatever_the_others_hold(tfla, cell, dtype):
    call = make(cell, Case(2, 150, 2, 16, 16, ("state", "hold"), 128), dtype)
    held = call["hold"]
    for name in ("k", "v"):
        for value in (float("inf"), float("nan")):
            sick = call[name].clone()
            sick[0, 10 + int((~held[0, 10:]).int().argmax())] = value
            h, _ = tfla.mlstm(**{**call, name: sick})
            assert not h[held].count_nonzero(), (name, value)
            assert not h[0, 20:].isfinite().all()
    state = tuple(torch.full_like(s, float("nan")) for s in call["state"])
    h, _ = tfla.mlstm(**{**call, "state": state})
    assert not h[held].count_nonzero()
    assert h[~held].isnan().all()


@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize("backend", test_held.BACKENDS)
def test_an_output_gate_of_held_steps_does_not_matter(tfla, cell, backend, norm):
    """A NaN in the output gate does not matter at held steps or past a row's end: h and the gate's
    gradient are 0 there."""
    call = make(cell, Case(2, 9, 2, 16, 16), torch.float32)
    hold = torch.arange(9).expand(2, 9) % 4 == 3
    for mask, held in (
        ({"hold": hold}, hold),
        ({"lengths": torch.tensor([4, 9])}, torch.tensor([[False] * 4 + [True] * 5, [False] * 9])),
    ):
        gate = torch.randn(2, 9, 2, 16).masked_fill(held[..., None, None], float("nan"))
        gate.requires_grad_()
        h, _ = tfla.mlstm(**call, **mask, out_gate=gate, norm=norm, backend=backend)
        assert not h[held].count_nonzero()
        assert h.isfinite().all()
        (grad,) = torch.autograd.grad(h.sum(), gate)
        assert not grad[held].count_nonzero()
        assert grad.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_nan_is_not_carried_past_a_reset(tfla, cell, value):
    call = make(cell, Case(2, 9, 2, 16, 16, ("state",)), torch.float32)
    call["state"] = tuple(torch.full_like(s, value) for s in call["state"])
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 4] = True
    _, want = tfla.mlstm(**call, reset=reset)
    given = {k: v for k, v in call.items() if k not in ("q", "state")}
    transfer = tfla.mlstm_transfer(**given, reset=reset)
    got = tfla.mlstm_carry(call["state"], transfer)
    first = transfer._replace(C=torch.full_like(transfer.C, value))
    both = [t for t in tfla.mlstm_compose(first, transfer)[:3] if t is not None]
    for result in (got, both):
        for a, b in zip(unscaled(result), unscaled(want), strict=True):
            assert_close("state", a, b, 1e-6)
