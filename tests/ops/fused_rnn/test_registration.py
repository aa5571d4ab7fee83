"""Tests that ops are fully registered (schema, fake, gradient), and that the compiled op gives the
values."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import DEVICE, Case, eager_and_compiled, make
from flashcell.kernels.fused_rnn import CELLS
from numerics import EPS, assert_bitwise, assert_close


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


def arguments(cell, options, requires_grad=True, dtype=torch.float32):
    call = make(cell, Case(2, 4, 2, 8, options), dtype)
    x, weight, bias = (call[k].requires_grad_(requires_grad) for k in ("x", "weight", "bias"))
    state = torch.stack(call["state"]).requires_grad_(requires_grad) if "state" in call else None
    masks = [call.get(k) for k in ("reset", "hold", "lengths", "cu_seqlens", "grad_clip")]
    return [x, weight, bias, state, *masks, False]


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "options", [("state", "reset", "hold", "clip"), ("state", "lengths"), ("state", "cu"), ()]
)
def test_opcheck(fused_rnn, name, options, save):
    ops = fused_rnn.dispatch.ops
    torch.library.opcheck(
        getattr(ops, f"{name}_fwd").default, (*arguments(CELLS[name], options), save)
    )


def test_fakes_know_which_results_are_fp32(fused_rnn, name):
    """Fakes have the right dtypes in bf16, where the states and saved values are wider than x."""
    call = (*arguments(CELLS[name], ("state", "reset"), dtype=torch.bfloat16), True)
    op = getattr(fused_rnn.dispatch.ops, f"{name}_fwd").default
    torch.library.opcheck(op, call, test_utils="test_faketensor")


@pytest.mark.parametrize("options", [("state", "reset"), ("state", "cu")], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fakes_of_the_backward(fused_rnn, name, options, dtype):
    """The fake of a backward has its results' shapes: among them dr, which is empty where it is dx."""
    op, calls = getattr(fused_rnn.dispatch.ops, f"{name}_bwd").default, []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is op:
                calls.append(args)
            return function(*args, **(kwargs or {}))

    call = make(CELLS[name], Case(2, 4, 2, 8, options), dtype)
    call["x"].requires_grad_()
    h, _ = fused_rnn.recurrent(name, **call)
    with Recorder():
        h.sum().backward()
    (args,) = calls
    torch.library.opcheck(op, args, test_utils="test_faketensor")


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's own elsewhere")
def test_opcheck_linear(fused_rnn):
    ops = fused_rnn.dispatch.ops
    x, w, b = (torch.randn(*s, requires_grad=True) for s in ((3, 2, 8), (5, 8), (5,)))
    torch.library.opcheck(ops.linear_fwd.default, (x, w, b))
    torch.library.opcheck(ops.linear_fwd.default, (x, w, None))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_transforms_of_torch_func(fused_rnn, name, backend):
    """torch.func's grad, and per-sample gradients by vmap, equal autograd's."""
    shape = CELLS[name].gates, 2, 8
    xs, weight = torch.randn(3, 2, 4, *shape), torch.randn(*shape, 8) / 8

    def loss(x, weight):
        h, last = fused_rnn.recurrent(name, x, weight, backend=backend)
        return h.square().sum() + sum(s.sum() for s in last)

    given = xs[0].requires_grad_(), weight.requires_grad_()
    want = torch.autograd.grad(loss(*given), given)
    gradients = torch.func.grad(loss, (0, 1))
    xs, weight = xs.detach(), weight.detach()
    one = gradients(xs[0], weight)
    each = torch.func.vmap(gradients, (0, None))(xs, weight)
    summed = torch.func.grad(lambda w: torch.func.vmap(loss, (0, None))(xs, w).sum())(weight)
    for k in range(2):
        assert_close("grad", one[k], want[k], 16 * EPS[torch.float32])
        assert_close("vmap(grad)", each[k][0], want[k], 16 * EPS[torch.float32])
    assert_close("grad(vmap)", summed, each[1].sum(0), 16 * EPS[torch.float32])


@pytest.mark.skipif(DEVICE != "cpu", reason="fp64 is the CPU's")
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gradcheck(fused_rnn, name):
    call = make(CELLS[name], Case(2, 3, 2, 3, ("state", "reset", "hold")), torch.float64)
    tensors = [call[k].requires_grad_() for k in ("x", "weight", "bias")]
    state = [s.requires_grad_() for s in call["state"]]
    masks = {k: call[k] for k in ("reset", "hold")}

    def outputs(x, weight, bias, *state):
        h, last = fused_rnn.recurrent(name, x, weight, bias, state, **masks)
        return (h, *last)

    assert torch.autograd.gradcheck(outputs, (*tensors, *state))


@pytest.mark.parametrize("save", ["gates", "recompute"])
def test_compiled_object(fused_rnn, name, save):
    """With fullgraph, forward and backward give the same bits as eager."""
    call = make(CELLS[name], Case(2, 5, 2, 8, ("state", "reset")), torch.float32)
    call["x"].requires_grad_()
    call["weight"].requires_grad_()

    def model(x, weight):
        rest = {k: v for k, v in call.items() if k not in ("x", "weight")}
        h, last = fused_rnn.recurrent(name, x * 2, weight, **rest, save=save)
        return h + last[0][:, None]

    for eager, traced in zip(*eager_and_compiled(model, call["x"], call["weight"]), strict=True):
        assert_bitwise("compiled", traced, eager)


def test_compiled_by_inductor(fused_rnn):
    """Values and gradients are right where inductor compiles what stands before and after the op."""
    call = make(CELLS["lstm"], Case(2, 5, 2, 8, ("state", "reset")), torch.float32)
    x, weight = call.pop("x").requires_grad_(), call.pop("weight").requires_grad_()

    def model(x, weight):
        h, (last, c) = fused_rnn.lstm(2 * x, weight, **call)
        return torch.sigmoid(h) + (last * c)[:, None]

    for eager, traced in zip(
        *eager_and_compiled(model, x, weight, backend="inductor"), strict=True
    ):
        assert_close("compiled", traced, eager, 8 * EPS[torch.float32])  # observed 2


def test_third_derivatives_are_refused(fused_rnn, name):
    """The kernels have two derivatives: the error names the alternative."""
    call = make(CELLS[name], Case(1, 2, 1, 4), torch.float32)
    x = call["x"].requires_grad_()

    def differentiate(times, **options):
        d = fused_rnn.recurrent(name, x, call["weight"], **options)[0].pow(3).sum()
        for _ in range(times):
            (dx,) = torch.autograd.grad(d, x, create_graph=True)
            d = dx.pow(2).sum()
        return dx

    if name not in fused_rnn.kept_steps.STEPS:
        with pytest.raises(RuntimeError, match=rf"no second derivatives of {name}.*'reference'"):
            differentiate(2)
        return
    assert differentiate(2).isfinite().all()
    with pytest.raises(RuntimeError, match=r"third derivatives.*backend='reference'"):
        differentiate(3)
    assert differentiate(3, backend="reference").isfinite().all()
    with pytest.raises(RuntimeError, match=r"grad_clip is 1.0.*backend='reference'"):
        differentiate(2, grad_clip=1.0)


@pytest.mark.parametrize("trained", ["x alone", "both"])
def test_second_derivatives_of_all_states_are_refused(fused_rnn, trained):
    """Also where the gradients of the outputs are constants and the weight has none."""
    call = make(CELLS["lstm"], Case(1, 3, 1, 4), torch.float32)
    x = call["x"].requires_grad_()
    weight = call["weight"].requires_grad_(trained == "both")
    h, _, (_, c) = fused_rnn.lstm(x, weight, return_states=True)
    (dx,) = torch.autograd.grad(h.sum() + c.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivatives.*backend='reference'"):
        dx.sum().backward()
