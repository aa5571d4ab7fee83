"""Tests derivatives in forward mode of every cell, with every option, against backward mode."""

import pytest
import torch

from cases import DEVICE, OPTIONS, Case, make
from ops.fused_rnn.test_sequence import CELLS

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="the reference computes them on any device"),
    pytest.mark.filterwarnings("ignore:the kernel has no derivatives in forward mode"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]
SHAPES = [Case(3, 7, 2, 5), Case(1, 1, 1, 1, ("state",)), Case(2, 1, 3, 4, ("state",))]
CASES = [*SHAPES, *(Case(4, 6, 2, 5, options) for options in OPTIONS)]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def split(name, case):
    """Returns a function of all floating inputs that gives all outputs that carry gradients, as
    named by the cell, and its inputs."""
    call = make(CELLS[name], case, torch.float64)
    carried = CELLS[name].states - CELLS[name].detached_states
    names = [k for k in ("x", "weight", "bias") if k in call]
    inputs = [call.pop(k) for k in names]
    state = call.pop("state", None)

    def run(kernel, *given, **options):
        named = dict(zip(names, given[: len(names)], strict=True))
        states = given[len(names) :]
        if state is not None:
            states = (*states, *state[carried:])
        h, last, every = kernel.recurrent(
            name, **named, **call, state=states or None, return_states=True, **options
        )
        return h, *last[:carried], *every[1:carried]

    return run, [*inputs, *([] if state is None else state[:carried])]


@pytest.mark.parametrize("case", [c for c in CASES if "clip" not in c.options], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_it_is_the_transpose_of_backward_mode(fused_rnn, name, case):
    """<u, J v> = <J^T u, v>, where the kernel's own backward computes J^T u."""
    run, inputs = split(name, case)
    if "cut" in case.options:  # which concerns gradients alone
        pytest.skip("the gradient is not the function's")
    v = [torch.randn_like(t) for t in inputs]
    values, tangents = torch.func.jvp(lambda *t: run(fused_rnn, *t), tuple(inputs), tuple(v))
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = run(fused_rnn, *leaves, backend=DEVICE)
    for value, output in zip(values, outputs, strict=True):
        torch.testing.assert_close(value, output.detach(), **TIGHT)
    u = [torch.randn_like(t) for t in tangents]
    back = torch.autograd.grad(outputs, leaves, u)
    forwards = sum((a * b).sum() for a, b in zip(u, tangents, strict=True))
    backwards = sum((a * b).sum() for a, b in zip(back, v, strict=True))
    torch.testing.assert_close(forwards, backwards, **TIGHT)


@pytest.mark.parametrize("name", CELLS)
def test_the_same_numbers_as_the_reference(fused_rnn, name):
    run, inputs = split(name, Case(3, 5, 2, 4, ("state", "reset", "hold")))
    v = tuple(torch.randn_like(t) for t in inputs)
    got = torch.func.jvp(lambda *t: run(fused_rnn, *t), tuple(inputs), v)
    want = torch.func.jvp(lambda *t: run(fused_rnn, *t, backend="reference"), tuple(inputs), v)
    for one, other in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CELLS)
def test_a_clipped_gradient_leaves_tangents_alone(fused_rnn, name):
    run, inputs = split(name, Case(2, 5, 1, 4))
    v = tuple(torch.randn_like(t) for t in inputs)
    want = torch.func.jvp(lambda *t: run(fused_rnn, *t), tuple(inputs), v)[1]
    for clip in (0.0, 1e-3):
        got = torch.func.jvp(lambda *t, c=clip: run(fused_rnn, *t, grad_clip=c), tuple(inputs), v)
        for one, other in zip(got[1], want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_of_other_dtypes(fused_rnn, dtype):
    call = make(CELLS["lstm"], Case(2, 5, 2, 8, ("state",)), dtype)
    x, v = call.pop("x"), torch.randn(2, 5, 4, 2, 8).to(dtype)
    function = lambda x: fused_rnn.lstm(x, **call)[0]
    _, tangent = torch.func.jvp(function, (x,), (v,))
    assert tangent.dtype == dtype
    wide = {
        k: tuple(t.double() for t in s) if k == "state" else s.double() for k, s in call.items()
    }
    exact = torch.func.jvp(lambda x: fused_rnn.lstm(x, **wide)[0], (x.double(),), (v.double(),))[1]
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (tangent.double() - exact).norm() <= bound * exact.norm()


def test_resets_to_given_states(fused_rnn):
    call = make(CELLS["gru"], Case(2, 6, 1, 4, ("state",)), torch.float64)
    reset = torch.zeros(2, 6, dtype=torch.bool)
    reset[0, 2] = reset[1, 5] = True
    given = torch.randn(2, 1, 4, dtype=torch.float64)
    function = lambda s: fused_rnn.gru(**call, reset=reset, reset_state=(s,))[0]
    jacobian = torch.func.jacfwd(function)(given)
    torch.testing.assert_close(jacobian, torch.func.jacrev(function)(given), **TIGHT)
    assert jacobian.any()


@pytest.mark.parametrize("name", CELLS)
def test_hessians_are_those_of_two_backwards(fused_rnn, name):
    run, inputs = split(name, Case(2, 3, 1, 2, ("state",)))

    def loss(*given):
        h, *_ = run(fused_rnn, *given)
        return h.square().sum()

    every = tuple(range(len(inputs)))
    got = torch.func.hessian(loss, argnums=every)(*inputs)
    call = make(CELLS[name], Case(2, 3, 1, 2, ("state",)), torch.float64)
    carried = CELLS[name].states - CELLS[name].detached_states

    def native(x, weight, bias, *states):
        state = (*states, *call["state"][carried:])
        return fused_rnn.recurrent(name, x, weight, bias, state, backend=DEVICE)[0].square().sum()

    want = torch.autograd.functional.hessian(native, tuple(inputs))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_hessian_vector_products(fused_rnn):
    """Forward over backward, and backward over forward."""
    call = make(CELLS["lstm"], Case(2, 4, 1, 3), torch.float64)
    x, weight = call["x"], call["weight"]
    loss = lambda x: fused_rnn.lstm(x, weight)[0].pow(3).sum()
    v = torch.randn_like(x)
    _, forward_over = torch.func.jvp(torch.func.grad(loss), (x,), (v,))
    over_forward = torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (v,))[1])(x)
    _, want = torch.autograd.functional.vhp(loss, x, v)
    torch.testing.assert_close(forward_over, want, **TIGHT)
    torch.testing.assert_close(over_forward, want, **TIGHT)


def test_a_batch_of_tangents_under_vmap(fused_rnn):
    call = make(CELLS["slstm"], Case(2, 4, 1, 3), torch.float64)
    function = lambda x: fused_rnn.slstm(x, call["weight"])[0]
    vs = torch.randn(3, *call["x"].shape, dtype=torch.float64)
    one = lambda v: torch.func.jvp(function, (call["x"],), (v,))[1]
    torch.testing.assert_close(torch.vmap(one)(vs), torch.stack([one(v) for v in vs]), **TIGHT)


def test_a_vectorized_jacobian(fused_rnn):
    """The older vmap of torch.autograd.functional has no rules for some functions, as for einsum."""
    call = make(CELLS["gru"], Case(2, 4, 2, 3), torch.float64)
    function = lambda x: fused_rnn.gru(x, call["weight"])[0]
    jacobian = torch.autograd.functional.jacobian
    got = jacobian(function, call["x"], vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(got, jacobian(function, call["x"]), **TIGHT)
