"""Tests the batch engine where it multiplies a layer's input itself, beside its product with h."""

from itertools import product

import pytest
import torch

from arch_cases import skip_unless_offered
from cases import DEVICE, Case
from numerics import EPS, assert_bitwise, assert_close
from ops.fused_rnn.test_layers import make

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WAYS = ["engine", "product"]  # what multiplies the input

# Sequences and units, by which the engine takes every kind of tile together with an input.
SIZES = [(768, 264), (768, 304), (1300, 304), (1300, 512), (1300, 656), (2048, 128), (2816, 264)]
SIZES += [(2048, 304), (4096, 264)]
cuda_alone = pytest.mark.skipif(DEVICE != "cuda", reason="CUDA alone has the batch engine")
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def run(fused_rnn, monkeypatch):
    """Returns the values and gradients of layers, [y, dx] with the batch first, on the batch engine."""

    def run(name, way, x, state, weights, batch_first=True, dtype=None, width=0, bias=True):
        D = weights[1].shape[0] // fused_rnn.CELLS[name].gates
        width, tf32 = width or -(-D // 8) * 8, dtype == torch.float32
        skip_unless_offered(fused_rnn, "batch", name, Case(140, 5, 1, width), dtype, tf32=tf32)
        monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
        monkeypatch.setenv("FLASHCELL_CUDA_INPUT", way)
        rows = x if batch_first else x.transpose(0, 1)
        given = [t.detach().requires_grad_() for t in (rows, *state, *weights)]
        options = (), bias, False, 1, batch_first, width, 0.0, tf32
        split = given[1 : 1 + len(state)], given[1 + len(state) :]
        with torch.no_grad():
            unsaved, _ = fused_rnn.run_layers(name, given[0], *split, options)
        y, last = fused_rnn.run_layers(name, given[0], *split, options)
        assert_bitwise("y of a pass that saves nothing", unsaved, y.detach())
        loss = y.float().square().sum() + sum(s.float().square().sum() for s in last)
        dx, *rest = torch.autograd.grad(loss, given)
        ordered = [t if batch_first else t.transpose(0, 1) for t in (y.detach(), dx)]
        return [*ordered, *(s.detach() for s in last), *rest]

    return run


def exact(name, x, state, weights, bias=True):
    """Returns the same from torch.nn in float64."""
    kind = {"lstm": torch.nn.LSTM, "rnn_tanh": torch.nn.RNN}[name]
    D, layers = weights[1].shape[1], len(weights) // (4 if bias else 2)
    net = kind(x.shape[2], D, layers, bias=bias, batch_first=True).to(DEVICE, torch.float64)
    with torch.no_grad():
        for own, w in zip(net.parameters(), weights, strict=True):
            own.copy_(w)
    given = [t.detach().double().requires_grad_() for t in (x, *state)]
    states = tuple(given[1:])
    y, last = net(given[0], (states if name == "lstm" else states[0]) if state else None)
    last = last if isinstance(last, tuple) else (last,)
    loss = y.square().sum() + sum(s.square().sum() for s in last)
    dx, *rest = torch.autograd.grad(loss, [*given, *net.parameters()])
    return [y.detach(), dx, *(s.detach() for s in last), *rest]


@cuda_alone
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("I", "D"), [(24, 64), (1, 64), (37, 50), (200, 52), (129, 72)])
@pytest.mark.parametrize("name", ["lstm", "rnn_tanh"])
def test_values_and_gradients(run, fused_rnn, name, I, D, dtype):
    """Those of float64, of inputs of any width, with states and without."""
    cell = fused_rnn.CELLS[name]
    for states, bias, T in ((True, True, 5), (False, False, 2)):
        call = {"I": I, "D": D, "B": 140, "T": T, "batch_first": True, "states": states}
        x, state, weights, _ = make(cell.gates, cell.states, **call, bias=bias, dtype=dtype)
        weights = [(w * (2 / w.shape[-1]) ** 0.5 if w.dim() == 2 else w).to(dtype) for w in weights]
        state = [s.to(dtype) for s in state]
        wanted = exact(name, x, state, weights, bias)
        found = {way: run(name, way, x, state, weights, dtype=dtype, bias=bias) for way in WAYS}
        for i, (own, other, value) in enumerate(zip(*found.values(), wanted, strict=True)):
            # TF32 has 10 bits; gradients are sums over all steps and sequences.
            eps = 2**-10 if dtype == torch.float32 else EPS[dtype]
            assert_close(f"value {i}", own.double(), value, 8 * eps)
            assert_close(f"value {i} of the other way", other.double(), value, 8 * eps)
        if dtype != torch.float32:  # a product before the recurrence is rounded
            assert not torch.equal(found["engine"][0], found["product"][0])
        ordered = run(name, "engine", x, state, weights, False, dtype, bias=bias)
        assert_bitwise("y in the order of time", ordered[0], found["engine"][0])


LAYERS = {
    "stacked and padded": {"D": 50, "layers": 3},
    "dropped out": {"D": 64, "layers": 3, "dropout": 0.4},
    "projected": {"D": 64, "layers": 2, "O": 24},
    "of fp32 weights": {"D": 50, "layers": 2, "states": True},
}


@cuda_alone
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_kinds_of_layers(fused_rnn, monkeypatch, kind, dtype):
    """Outputs, states and gradients are those of products before the recurrence."""
    tf32, call = dtype == torch.float32, {"I": 37, "B": 140, "T": 5, **LAYERS[kind]}
    width = -(-call["D"] // 8) * 8
    skip_unless_offered(fused_rnn, "batch", "lstm", Case(140, 5, 1, width), dtype, tf32=tf32)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
    x, state, weights, options = make(4, 2, **call, width=width, dtype=dtype)
    kept = torch.float32 if "fp32" in kind else dtype
    weights = [(w * (2 / w.shape[-1]) ** 0.5 if w.dim() == 2 else w).to(kept) for w in weights]
    state, found = [s.to(dtype) for s in state], []
    for way in WAYS:
        monkeypatch.setenv("FLASHCELL_CUDA_INPUT", way)
        given = [t.detach().requires_grad_() for t in (x, *weights)]
        arguments = given[0], state, given[1:], (*options[:7], tf32)
        torch.manual_seed(1)
        with torch.no_grad():
            unsaved, _ = fused_rnn.run_layers("lstm", *arguments)
        torch.manual_seed(1)
        y, last = fused_rnn.run_layers("lstm", *arguments)
        assert_bitwise("y of a pass that saves nothing", unsaved, y.detach())
        gradients = torch.autograd.grad(y.float().square().sum(), given)
        found.append([y.detach(), *(s.detach() for s in last), *gradients])
    assert tf32 or not torch.equal(found[0][0], found[1][0])
    bound = 16 * (2**-10 if tf32 else EPS[dtype])
    for own, other in zip(*found, strict=True):
        assert_close("value", own.double(), other.double(), bound)


def test_every_kind_of_tile_is_tested(fused_rnn):
    """Each kind of tile that the engine takes together with an input, it takes for a size in SIZES."""

    def kinds(sizes):
        found = set()
        for name, dtype, (B, D) in product(("lstm", "rnn_tanh"), ("bfloat16", "float32"), sizes):
            call = (name, 1, D, B, dtype, "H200", 3, "tf32")
            plan = fused_rnn.explain_plan(*call, input_width=D)
            if plan.fields["input"] == "engine":
                for saving in ("", "saving."):
                    keys = (f"{saving}{key}" for key in ("tile", "units", "takes_turns"))
                    found.add((name, dtype, saving, *(plan.fields[key] for key in keys)))
        return found

    widths = (128, 264, 304, 512, 656, 896, 1024, 1152, 1312, 1536)
    batches = (64, 200, 320, 512, 640, 768, 1024, 1300, 2048, 2816, 4096)
    assert kinds(SIZES) >= kinds(list(product(batches, widths)))


@cuda_alone
@pytest.mark.parametrize(("dtype", "saves"), list(product(DTYPES[::2], [False, True])), ids=str)
@pytest.mark.parametrize(("B", "D"), SIZES)
@pytest.mark.parametrize("name", ["lstm", "rnn_tanh"])
def test_every_tile(fused_rnn, monkeypatch, name, B, D, dtype, saves):
    """The tiles that are taken for these sizes, with two layers, the second as wide as the first."""
    tf32, cell = dtype == torch.float32, fused_rnn.CELLS[name]
    skip_unless_offered(fused_rnn, "batch", name, Case(B, 3, 1, D), dtype, tf32=tf32)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
    call = {"I": D, "D": D, "B": B, "T": 3, "batch_first": True, "layers": 2, "dtype": dtype}
    x, _, weights, options = make(cell.gates, cell.states, **call)
    weights = [(w * (2 / w.shape[-1]) ** 0.5 if w.dim() == 2 else w).to(dtype) for w in weights]
    options = (*options[:7], tf32)
    found = []
    for way in WAYS:
        monkeypatch.setenv("FLASHCELL_CUDA_INPUT", way)
        with torch.set_grad_enabled(saves):
            given = [w.requires_grad_(saves) for w in weights]
            y, last = fused_rnn.run_layers(name, x, [], given, options)
            again, _ = fused_rnn.run_layers(name, x, [], given, options)
        assert_bitwise("y again", again.detach(), y.detach())
        found.append([y.detach(), *(s.detach() for s in last)])
    bound = 4 * (2**-10 if tf32 else EPS[dtype])
    for own, other in zip(*found, strict=True):
        assert_close("value", own.float(), other.float(), bound)


@cuda_alone
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["lstm", "rnn_tanh"])
def test_tiny_input(run, fused_rnn, name, dtype):
    """Runs the engine where it multiplies an input, for scripts/check_cuda."""
    cell = fused_rnn.CELLS[name]
    call = {"I": 37, "D": 72, "B": 70, "T": 3, "batch_first": True, "states": True}
    x, state, weights, _ = make(cell.gates, cell.states, **call, dtype=dtype)
    state, weights = ([t.to(dtype) for t in ts] for ts in (state, weights))
    assert all(v.isfinite().all() for v in run(name, "engine", x, state, weights, dtype=dtype))
