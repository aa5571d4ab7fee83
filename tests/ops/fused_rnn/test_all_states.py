"""Tests the states of every step: values, and gradients that come in by way of them."""

import pytest
import torch

from cases import CASES, DEVICE, EMPTY, Case, make, upcast, with_gradients
from flashcell.kernels import fused_rnn as reference
from flashcell.kernels.fused_rnn.all_states import scan_back, scan_in_rounds
from numerics import assert_as_accurate
from ops.fused_rnn.test_sequence import CELLS, DTYPES, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
LONG = [Case(2, 300, 1, 8, ("state", "reset")), Case(3, 70, 2, 16, ("state", "reset", "hold"))]
IN_FORM = [case for case in [*CASES, *LONG] if "clip" not in case.options]


def run(function, name, call, given, **options):
    """Returns h, the last states, those of every step, and the gradients of every floating input, by
    name."""
    leaf = lambda t: t.detach().requires_grad_(t.is_floating_point())
    call = {k: tuple(map(leaf, v)) if k == "state" else v for k, v in call.items()}
    call.update({k: leaf(call[k]) for k in ("x", "weight", "bias") if k in call})
    h, last, states = function(name, **call, return_states=True, **options)
    assert states[0] is h
    carried = CELLS[name].states - CELLS[name].detached_states
    sources = {k: call[k] for k in ("x", "weight", "bias") if k in call}
    sources |= {f"state[{k}]": s for k, s in enumerate(call.get("state", ())[:carried])}
    assert not any(s.requires_grad for s in states[carried:])
    none = [None] * (len(last) - carried)
    dlast, dstates = [*given[1 : 1 + carried], *none], [*given[1 + carried :], *none]
    return with_gradients(h, last, sources, given[0], dlast, states[1:], dstates)


def draw(name, call, dtype):
    dh, dlast = upstream(name, call, dtype)
    carried = CELLS[name].states - CELLS[name].detached_states
    return [dh, *dlast[:carried], *torch.randn(carried - 1, *dh.shape)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", IN_FORM, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru", "slstm"])
def test_they_are_the_references(fused_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype)
    given = draw(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, given, backend=DEVICE)
    peer = run(reference.recurrent, name, call, given)
    exact = run(reference.recurrent, name, upcast(call), given)
    assert got.keys() == exact.keys()
    for key in exact:
        values = got[key], exact[key], peer[key]
        # On CUDA states come from values saved in 16 bits, and a 16-bit dh is rounded once more.
        rounded = key.startswith("d") or (key.startswith("states") and DEVICE == "cuda")
        on_cuda = (dtype, rounded) if rounded or DEVICE == "cuda" else None
        terms = max(case.D, case.B * case.T) if key in ("dweight", "dbias") else case.D
        assert_as_accurate(f"{name} {case} {key}", *values, terms, on_cuda)


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", ["lstm", "slstm"])
def test_empty_sizes(fused_rnn, name, case):
    call = make(CELLS[name], case, torch.float32)
    given = draw(name, call, torch.float32)
    got = run(fused_rnn.recurrent, name, call, given, backend=DEVICE)
    want = run(reference.recurrent, name, call, given)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


def test_gradients_of_one_output_alone(fused_rnn):
    """Outputs that take no part may have no gradient at all."""
    for name in ("lstm", "slstm"):
        call = make(CELLS[name], Case(2, 5, 1, 8, ("state",)), torch.float32)
        every = draw(name, call, torch.float32)
        for k in range(len(every)):
            given = [d if k == at else None for at, d in enumerate(every)]
            got = run(fused_rnn.recurrent, name, call, given, backend=DEVICE)
            want = run(reference.recurrent, name, call, given)
            for key in want:
                torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5, msg=key)


def test_a_clipped_gradient_of_states_is_refused(fused_rnn):
    call = make(CELLS["lstm"], Case(2, 5, 1, 8, ("clip",)), torch.float32)
    x = call["x"].requires_grad_()
    _, _, (h, c) = fused_rnn.lstm(**call, return_states=True, backend=DEVICE)
    (of_h,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    torch.testing.assert_close(
        of_h, torch.autograd.grad(fused_rnn.lstm(**call, backend=DEVICE)[0].sum(), x)[0]
    )
    with pytest.raises(RuntimeError, match=r"grad_clip is 0\.05, but must be None or 0"):
        c.sum().backward()
    with pytest.raises(TypeError, match=r"return_states is a int, but must be"):
        fused_rnn.lstm(**call, return_states=1)


@pytest.mark.parametrize("mask", ["reset", "cu_seqlens"])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("name", ["lstm", "slstm"])
def test_nan_stays_in_its_document(fused_rnn, name, where, mask):
    x, weight = torch.randn(1, 6, 4, 1, 3), torch.randn(4, 1, 3, 3)
    x[0, 1 if where == "before" else 4, 1] = torch.nan
    x.requires_grad_()
    marks = torch.tensor([[0, 0, 0, 1, 0, 0]]).bool()
    masks = {"reset": marks} if mask == "reset" else {"cu_seqlens": torch.tensor([0, 3, 6])}
    h, _, states = fused_rnn.recurrent(name, x, weight, **masks, return_states=True)
    (dx,) = torch.autograd.grad(h.sum() + states[1].sum(), x)
    clean = slice(3, 6) if where == "before" else slice(0, 3)
    assert all(s[0, clean].isfinite().all() for s in (*states, dx))


@pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")
def test_scans_stop_at_zero():
    d, keep = torch.randn(2, 9, 1, 3), torch.rand(2, 9, 1, 3)
    keep[:, 4], d[0, 6] = 0, torch.nan
    by_steps = scan_back(d, keep)
    assert by_steps[0, 4:7].isnan().all()
    assert by_steps[0, :4].isfinite().all()
    torch.testing.assert_close(scan_in_rounds(d, keep), by_steps, equal_nan=True)


@pytest.mark.parametrize("name", ["lstm", "slstm"])
def test_autocast_changes_nothing(fused_rnn, name):
    x = torch.randn(2, 6, 4, 1, 8, requires_grad=True)
    weight = torch.randn(4, 1, 8, 8, requires_grad=True)

    def run():
        h, _, states = fused_rnn.recurrent(name, x, weight, return_states=True)
        return (h, *states, *torch.autograd.grad(h.sum() + states[1].sum(), (x, weight)))

    usual = run()
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(run(), usual, rtol=0, atol=0)
