"""Tests layers that run side by side on CUDA, in chunks of time."""

import pytest
import torch

from cases import DEVICE
from numerics import assert_as_accurate, assert_bitwise, rms
from ops.fused_rnn.test_layers import make

on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}

# layers, sequences, steps, inputs, units, units with those of padding, steps of a chunk
SIZES = {
    "block": (3, 3, 11, 5, 32, 32, 4),
    "padded": (2, 5, 9, 7, 21, 24, 3),
    "cluster": (4, 9, 12, 16, 160, 160, 4),
    "grid": (2, 17, 7, 8, 520, 520, 2),
    "one step left": (3, 4, 7, 8, 64, 64, 3),
    "one chunk": (2, 4, 5, 8, 64, 64, 5),
    "chunks of one step": (2, 4, 5, 8, 64, 64, 1),
    "six layers": (6, 2, 20, 3, 40, 40, 6),
    "blocks of several sequences": (3, 100, 24, 8, 128, 128, 6),
    # in exact fp32 products of cuBLAS; and in halves, as a graph where a chunk has more than 40 steps
    "wide, few sequences": (3, 3, 7, 8, 264, 264, 2),
    "wide, many steps": (3, 16, 100, 8, 264, 264, 44),
}


def ops_of(fused_rnn, name):
    ops = fused_rnn.dispatch.ops
    return getattr(ops, f"{name}_layers_fwd"), getattr(ops, f"{name}_layers_bwd")


def call(fused_rnn, name, size, dtype, tf32=False, states=True, **options):
    cell = fused_rnn.CELLS[name]
    L, B, T, I, D, P, chunk = SIZES[size]
    x, state, weights, rest = make(
        cell.gates, cell.states, I, D, B, T, L, width=P, states=states, dtype=dtype, **options
    )
    weights = [(2 * w / D**0.5).to(dtype) for w in weights]
    return x, [s.to(dtype) for s in state], weights, (*rest[:-1], tf32), chunk


def run(fused_rnn, name, x, state, weights, options, chunk):
    """Returns the outputs, last states and gradients by name."""
    forward, backward = ops_of(fused_rnn, name)
    y, last, kept = forward(x, state, weights, *options, True, chunk)
    inferred, ends, _ = forward(x, state, weights, *options, False, chunk)
    if options[6] == 0:
        assert_bitwise("inference", inferred, y)
        for a, b in zip(ends, last, strict=True):
            assert_bitwise("inference, last", a, b)
    dlast = [torch.ones_like(s) for s in last]
    dy = torch.ones_like(y).cumsum(1) / y.shape[1]
    dx, dstate, dweights = backward(dy, dlast, x, weights, kept, *options, True, bool(state), chunk)
    lists = {"last": last, "dstate": dstate, "dweights": dweights}
    named = {f"{key}[{i}]": t for key, of in lists.items() for i, t in enumerate(of)}
    return {"y": y, "dx": dx, **named}, dy, dlast


def exactly(name, x, state, weights, dy, dlast):
    """Does the same by torch.nn's module in float64."""
    wide = lambda t: t.detach().double().cpu().requires_grad_()
    L, K = len(weights) // 4, len(state)
    module = MODULES[name](x.shape[-1], weights[1].shape[1], L).double()
    for parameter, weight in zip(module.parameters(), weights, strict=True):
        parameter.data = wide(weight).data
    x, state = wide(x), [wide(s) for s in state]
    hx = None if not state else tuple(state) if name == "lstm" else state[0]
    y, last = module(x, hx)
    last = list(last) if name == "lstm" else [last]
    given = [x, *state, *module.parameters()]
    upstream = [dy.double().cpu(), *(d.double().cpu() for d in dlast)]
    dx, *more = torch.autograd.grad([y, *last], given, upstream)
    lists = {"last": last, "dstate": more[:K], "dweights": more[K:]}
    named = {f"{key}[{i}]": t for key, of in lists.items() for i, t in enumerate(of)}
    return {"y": y, "dx": dx, **named}


@on_cuda
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "tf32"])
def test_chunks_are_as_accurate_as_single_layers(fused_rnn, name, kind, size):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    torch.manual_seed(0)
    x, state, weights, options, chunk = call(fused_rnn, name, size, dtype, kind == "tf32")
    got, dy, dlast = run(fused_rnn, name, x, state, weights, options, chunk)
    again, _, _ = run(fused_rnn, name, x, state, weights, options, chunk)
    peer, _, _ = run(fused_rnn, name, x, state, weights, options, 0)
    exact = exactly(name, x, state, weights, dy, dlast)
    for key, value in got.items():
        assert_bitwise(key, again[key], value)
        # Fewer layers at once may run in exact fp32. A product of rounded operands, in float64, gave dx of
        # six tanh layers errors up to 2.7e-3 (8 seeds).
        if kind == "tf32":
            error = rms(value.cpu().double() - exact[key]) / rms(exact[key])
            assert error < (4e-3 if name == "rnn_tanh" else 1e-3), (key, error)
            continue
        terms = x.shape[0] * x.shape[1] if "dweights" in key else weights[1].shape[1]
        gradient = (dtype, key.startswith("d"))
        assert_as_accurate(key, value.cpu(), exact[key], peer[key].cpu(), terms, gradient)


@on_cuda
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layouts_and_absent_tensors(fused_rnn, batch_first, bias):
    torch.manual_seed(0)
    x, state, weights, options, chunk = call(
        fused_rnn, "gru", "block", torch.float32, states=False, bias=bias, batch_first=batch_first
    )
    got, _, _ = run(fused_rnn, "gru", x, state, weights, options, chunk)
    want, _, _ = run(fused_rnn, "gru", x, state, weights, options, 0)
    assert "dstate[0]" not in got
    for key, value in got.items():
        torch.testing.assert_close(value, want[key], rtol=1e-5, atol=1e-5)
    forward, backward = ops_of(fused_rnn, "gru")
    _, last, kept = forward(x, state, weights, *options, True, chunk)
    dlast = [torch.ones_like(s) for s in last]
    dx, _, dweights = backward(None, dlast, x, weights, kept, *options, False, False, chunk)
    _, _, kept = forward(x, state, weights, *options, True, 0)
    _, _, wanted = backward(None, dlast, x, weights, kept, *options, False, False, 0)
    assert dx.numel() == 0
    for value, other in zip(dweights, wanted, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


@on_cuda
@pytest.mark.parametrize("size", ["block", "one chunk", "six layers"])
@pytest.mark.parametrize("name", MODULES)
def test_dropout_has_its_gradients(fused_rnn, name, size):
    torch.manual_seed(0)
    x, _, weights, options, chunk = call(
        fused_rnn, name, size, torch.float32, dropout=0.4, states=False
    )
    forward, backward = ops_of(fused_rnn, name)
    way = [torch.randn_like(t) for t in (x, *weights)]

    def output(step):
        torch.manual_seed(1)
        moved = [t + step * w for t, w in zip((x, *weights), way, strict=True)]
        return forward(moved[0], [], moved[1:], *options, True, chunk)

    y, _, kept = output(0.0)
    dy = torch.randn_like(y)
    dx, _, dweights = backward(dy, [], x, weights, kept, *options, True, False, chunk)
    got = sum((g.double() * w.double()).sum() for g, w in zip((dx, *dweights), way, strict=True))
    near, far = (output(step)[0].double() for step in (-1e-3, 1e-3))
    want = ((far - near) * dy.double()).sum() / 2e-3
    assert not torch.equal(y, forward(x, [], weights, *options[:6], 0.0, False, True, chunk)[0])
    assert abs(got - want) < 6e-3 * (abs(want) + 1), (got, want)


@on_cuda
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("size", ["block", "padded"])
def test_opcheck(fused_rnn, size, dropout):
    x, state, weights, options, chunk = call(
        fused_rnn, "lstm", size, torch.float32, dropout=dropout
    )
    forward, backward = ops_of(fused_rnn, "lstm")
    checks = ["test_schema", "test_faketensor"]
    given = x, state, weights, *options, True, chunk
    torch.library.opcheck(forward.default, given, test_utils=checks)
    y, last, kept = forward(*given)
    given = y, last, x, weights, kept, *options, True, True, chunk
    torch.library.opcheck(backward.default, given, test_utils=checks)


@on_cuda
def test_a_module_runs_the_chunks_that_the_plan_names(fused_rnn, monkeypatch):
    x, state, weights, options = make(4, 2, 64, 256, 4, 256, 4, bias=False, dtype=torch.bfloat16)
    problem = "lstm", 4, False, 4, 256, 256, 2, False
    chunk = fused_rnn.dispatch.ops.plan_layers(*problem)
    assert 8 <= chunk <= 128
    y, _ = fused_rnn.run_layers("lstm", x, state, weights, options)
    forward, _ = ops_of(fused_rnn, "lstm")
    assert_bitwise("y", y, forward(x, state, weights, *options, False, chunk)[0])
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "step")
    alone, _ = fused_rnn.run_layers("lstm", x, state, weights, options)
    assert_bitwise("y", alone, forward(x, state, weights, *options, False, 0)[0])


@on_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_tiny_layers(fused_rnn, name, dtype):
    """Runs every copy of the modules' layers, in chunks and without, for scripts/check_cuda."""
    for size in ("padded", "one step left"):
        for dropout in (0.0, 0.5):
            *given, chunk = call(fused_rnn, name, size, getattr(torch, dtype), dropout=dropout)
            for steps in (0, chunk):
                got, _, _ = run(fused_rnn, name, *given, steps)
                assert all(value.isfinite().all() for value in got.values())


def test_wrong_chunks_are_errors(fused_rnn):
    x, state, weights, options = make(4, 2, layers=2)
    forward, _ = ops_of(fused_rnn, "lstm")
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="chunk must be 0 on the CPU, got 2"):
            forward(x, state, weights, *options, True, 2)
        return
    for chunk in (-1, 5):
        with pytest.raises(RuntimeError, match=f"chunk must be from .* got {chunk}"):
            forward(x, state, weights, *options, True, chunk)
    x, state, weights, options = make(4, 2)
    with pytest.raises(RuntimeError, match="chunk must be 0 for one layer"):
        forward(x, state, weights, *options, True, 2)
