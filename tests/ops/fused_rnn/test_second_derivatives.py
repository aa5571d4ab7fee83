"""Tests second derivatives of the cells' ops (create_graph=True) against those of the reference."""

import pytest
import torch

from cases import CASES, DEVICE, Case, make, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate
from ops.fused_rnn.test_sequence import CELLS, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
LONG = [Case(2, 90, 1, 8, ("state", "reset")), Case(3, 40, 2, 16, ("state", "reset", "hold"))]
CLIPPED = {"clip", "cut"}
IN_FORM = [c for c in [*CASES, *LONG] if not CLIPPED & set(c.options) and c.T <= 90]
DTYPES = [torch.float32] if DEVICE == "cuda" else [torch.float64, torch.float32]


def second_gradients(function, name, call, given, weights, **options):
    """Returns gradients by all inputs, and by the gradients of the outputs, of a weighted sum of the
    first gradients."""
    spec = CELLS[name]
    carried = spec.states - spec.detached_states
    leaf = lambda t: t.detach().requires_grad_(t.is_floating_point())
    call = {k: tuple(map(leaf, v)) if k == "state" else v for k, v in call.items()}
    call.update({k: leaf(call[k]) for k in ("x", "weight", "bias") if k in call})
    given = [leaf(d) for d in given]
    h, last = function(name, **call, **options)
    sources = {k: call[k] for k in ("x", "weight", "bias") if k in call}
    sources |= {f"state[{k}]": s for k, s in enumerate(call.get("state", ())[:carried])}
    outputs = [h, *last[:carried]]
    used = [(y, d) for y, d in zip(outputs, given, strict=True) if y.requires_grad]
    ys, ds = [y for y, _ in used], [d for _, d in used]
    first = torch.autograd.grad(
        ys, list(sources.values()), ds, create_graph=True, materialize_grads=True
    )
    total = sum((g * w.to(g.dtype)).sum() for g, w in zip(first, weights, strict=True))
    by = [*sources.values(), *ds]
    if not total.requires_grad:  # with T = 0 the gradients are constants
        return {}
    found = torch.autograd.grad(total, by, materialize_grads=True)
    names = [*(f"d{k}" for k in sources), *(f"dd{k}" for k in range(len(ds)))]
    return {k: g.detach() for k, g in zip(names, found, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", IN_FORM, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_they_are_the_references(fused_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    carried = CELLS[name].states - CELLS[name].detached_states
    given = [dh, *dlast[:carried]]
    inputs = [call[k] for k in ("x", "weight", "bias") if k in call]
    inputs += call.get("state", ())[:carried]
    weights = [torch.randn(t.shape, dtype=torch.float64, device=t.device) for t in inputs]
    got = second_gradients(fused_rnn.recurrent, name, call, given, weights, backend=DEVICE)
    peer = second_gradients(reference.recurrent, name, call, given, weights)
    wide = [d.double() for d in given]
    exact = second_gradients(reference.recurrent, name, upcast(call), wide, weights)
    options = {"backend": DEVICE, "save": "recompute"}
    recomputed = second_gradients(fused_rnn.recurrent, name, call, given, weights, **options)
    assert got.keys() == exact.keys() == recomputed.keys()
    for key in exact:
        # Two sums, and on CUDA exponentials that are not exact: observed 1.3 times the bound of two sums.
        terms = (16 if DEVICE == "cuda" else 2) * (
            max(case.D, case.B * case.T) if key in ("dweight", "dbias") else case.D
        )
        assert_as_accurate(key, got[key], exact[key], peer[key], terms)
        assert_as_accurate(key, recomputed[key], exact[key], peer[key], terms)


@pytest.mark.parametrize("N", [1, 2])
def test_of_a_transposed_weight(fused_rnn, N):
    """Its rows are no matrix in memory."""
    call = make(CELLS["lstm"], Case(2, 3, N, 8), torch.float32)
    found = []
    for weight in (call["weight"], call["weight"].mT.contiguous().mT):
        leaf = weight.detach().requires_grad_()
        h, _ = fused_rnn.lstm(call["x"], leaf, backend=DEVICE)
        (first,) = torch.autograd.grad(h.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels on CUDA have no fp64")
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CELLS)
def test_gradgradcheck(fused_rnn, name, fast):
    spec = CELLS[name]
    call = make(spec, Case(2, 3, 2, 3, ("state",)), torch.float64)
    carried = spec.states - spec.detached_states
    others = call["state"][carried:]

    def run(x, weight, bias, *state):
        h, last = fused_rnn.recurrent(name, x, weight, bias, (*state, *others))
        return (h,) if others else (h, *last[:carried])  # those of c and n are at fixed m

    inputs = [call["x"], call["weight"], call["bias"], *call["state"][:carried]]
    if others:
        inputs[-1] = inputs[-1] + 0.5  # n, which is not continuous at 0
    assert torch.autograd.gradgradcheck(run, [t.requires_grad_() for t in inputs], fast_mode=fast)


@pytest.mark.parametrize("name", CELLS)
def test_third_derivatives_are_refused_where_they_are_linear(fused_rnn, name):
    """torch.autograd.functional.hvp differentiates a second backward by its incoming gradient."""
    call = make(CELLS[name], Case(2, 4, 1, 3), torch.float32)
    loss = lambda x: fused_rnn.recurrent(name, x, call["weight"])[0].pow(3).sum()
    v = torch.randn_like(call["x"])
    with pytest.raises(RuntimeError, match=r"no third derivatives.*hvp.*backend='reference'"):
        torch.autograd.functional.hvp(loss, call["x"], v)
    _, got = torch.autograd.functional.vhp(loss, call["x"], v)
    exact = lambda x: (
        fused_rnn.recurrent(name, x, call["weight"], backend="reference")[0].pow(3).sum()
    )
    _, want = torch.autograd.functional.hvp(exact, call["x"], v)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 0, 4), (2, 3, 0)], ids=["no steps", "no units"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
def test_without_values(fused_rnn, cell, sizes):
    (B, T, D), spec = sizes, fused_rnn.CELLS[cell]
    x = torch.randn(B, T, spec.gates, 1, D, requires_grad=True)
    weight = torch.randn(spec.gates, 1, D, D, requires_grad=True)
    state = tuple(torch.rand(spec.states, B, 1, D).requires_grad_().unbind())
    h, last = fused_rnn.recurrent(cell, x, weight, state=state)
    first = torch.autograd.grad(
        h.sum() + last[0].square().sum(), (x, weight, *state[:1]), create_graph=True
    )
    (d,) = torch.autograd.grad(sum(d.sum() for d in first), state[:1], allow_unused=True)
    assert d is None or d.shape == state[0].shape
