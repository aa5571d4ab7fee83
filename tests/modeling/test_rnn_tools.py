"""Tests torch's tools on the stand-ins: fx, jit.trace, skip_init, parametrizations; and its error
classes."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence

import flashcell
from cases import DEVICE
from torch_twins import CELLS, SEQUENCES, assert_same, flatten, make_twins

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")
KINDS = SEQUENCES + CELLS


class Model(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(6, 2)

    def forward(self, x):
        y = self.recurrent(x)
        return self.head(y[0] if isinstance(self.recurrent, (nn.RNNBase, nn.LSTMCell)) else y)


def make_input(kind, batch=3):
    return torch.randn(batch, 4) if kind in CELLS else torch.randn(5, batch, 4)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fx_takes_them_for_leaves(kind, replaced):
    model = Model(getattr(nn if replaced else flashcell, kind)(4, 6))
    if replaced:
        flashcell.replace(model)
    x = make_input(kind)
    traced = torch.fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["recurrent", "head"]
    assert torch.equal(traced(x), model(x))
    assert type(model.recurrent).__module__ == "flashcell.layers.rnn"


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_jit_trace(kind):
    """jit.trace's check runs the module again without gradients and compares the two graphs. The
    trace accepts other batches, also with states that are contiguous to each other in memory,
    and trains."""
    ours = getattr(flashcell, kind)(4, 6)
    rows = (3,) if kind in CELLS else (1, 3)

    def call(batch):
        hx = torch.randn(2, *rows[:-1], batch, 6)
        return make_input(kind, batch), (hx[0], hx[1]) if kind.startswith("LSTM") else hx[0]

    for example in (call(3), call(3)[:1]):
        traced = torch.jit.trace(ours, example)
        given = call(7)[: len(example)]
        got, want = traced(*given), ours(*given)
        pairs = [dict(enumerate(t.detach() for t in flatten(v))) for v in (got, want)]
        assert_same(*pairs, 0.0)
        grads = [
            torch.autograd.grad(flatten(v)[0].square().sum(), list(ours.parameters()))
            for v in (got, want)
        ]
        assert_same(*(dict(enumerate(g)) for g in grads), 1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_constructors_have_torch_s_signature(kind):
    ours, theirs = (inspect.signature(getattr(m, kind)).parameters for m in (flashcell, nn))
    assert list(ours) == [*theirs, "backend"]
    assert all(ours[name].default == theirs[name].default for name in theirs)
    module = nn.utils.skip_init(getattr(flashcell, kind), 4, 6, backend="reference")
    assert module.weight_ih.device.type == DEVICE
    assert module.kernel_backend == "reference"
    last = [None, torch.float64] if kind != "RNNCell" else ["relu", None, torch.float64]
    assert getattr(flashcell, kind)(4, 6, False, *last).weight_ih.dtype == torch.float64


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return 2 * x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weight_ih", "bias_hh"])
def test_parametrizations_run_as_often_as_in_torch(kind, name):
    counts, name = [], name if kind in CELLS else f"{name}_l1"
    for library in (nn, flashcell):
        options = {} if kind in CELLS else {"num_layers": 2}
        module, counted = getattr(library, kind)(4, 6, **options), Counted()
        parametrize.register_parametrization(module, name, counted)
        counted.count = 0
        for _ in range(3):
            module(make_input(kind))
        counts.append(counted.count)
    assert counts[0] == counts[1] > 0


def test_spectral_norm_trains_as_torch():
    """Each evaluation in training is one iteration of its power method."""
    twins = make_twins("LSTM", 4, 6, dtype=torch.float64)
    for twin in twins:
        torch.manual_seed(2)
        nn.utils.parametrizations.spectral_norm(twin, "weight_hh_l0")
    x, results = torch.randn(5, 3, 4, dtype=torch.float64), []
    for twin in twins:
        for _ in range(3):
            y = twin(x)[0]
        results.append({"y": y.detach(), "u": twin.parametrizations.weight_hh_l0[0]._u})
    assert_same(*results, 1e-12)


def wrong_calls(kind):
    """Calls that torch.nn refuses; packed ones only if torch.nn does not read beyond a buffer for
    them."""
    pair, cell = kind.startswith("LSTM"), kind in CELLS
    rows, x = (3, 6) if cell else (1, 3, 6), make_input(kind)
    h = torch.randn(rows)
    both = lambda *shape, **k: (torch.randn(*shape, **k),) * 2 if pair else torch.randn(*shape, **k)
    inputs = {"numpy": x.numpy(), "list": [1.0], "None": None, "tuple": (x, x), "0-D": x.sum(),
              "meta": x.to("meta"), "int64": x.long(), "float64": x.double(),
              "complex": x.to(torch.complex64), "wide": torch.randn(*x.shape[:-1], 5),
              "4-D": torch.randn(1, 1, 3, 4)}  # fmt: skip
    states = {"one": (h,), "two": (h, h), "three": (h, h, h), "tensor": h, "list": [h, h], "none": (),
              "stacked": torch.stack((h, h)), "text": "ab", "number": 5, "dict": {"h": h},
              "with None": (h, None), "batch": both(*rows[:-2], 2, 6), "width": both(*rows[:-1], 7),
              "dims": both(1, 1, *rows), "integers": (h.long(), h.long()) if pair else h.long(),
              "meta": both(*rows, device="meta")}  # fmt: skip
    yield from ((f"input {name}", (value,)) for name, value in inputs.items())
    yield from ((f"hx {name}", (x, value)) for name, value in states.items())
    unbatched = x[0] if cell else x[:, 0]
    yield from ((f"unbatched hx {name}", (unbatched, value)) for name, value in states.items())
    if not cell:
        packed = pack_sequence([torch.randn(3, 4)] * 3)
        for name in ("tensor", "three", "number", "dict"):
            yield f"packed hx {name}", (packed, states[name])
        yield "packed float64", (pack_sequence([torch.randn(3, 4).double()] * 3),)
        yield "packed meta", (pack_sequence([torch.randn(3, 4)]).to("meta"),)


def outcome(module, arguments) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module(*arguments)
        except Exception as error:
            return type(error).__name__
    return "no error"


@pytest.mark.parametrize("kind", KINDS)
def test_error_classes_are_torch_s(kind):
    """Wrong calls raise the same class of error as the installed torch.nn, for callers that catch it."""
    theirs, ours = make_twins(kind, 4, 6)
    calls = list(wrong_calls(kind))
    outcomes = {name: (outcome(theirs, call), outcome(ours, call)) for name, call in calls}
    assert {name: pair for name, pair in outcomes.items() if pair[0] != pair[1]} == {}
    assert sum(pair[0] != "no error" for pair in outcomes.values()) > 20
    with pytest.raises(AttributeError, match="input is a ndarray, but must be a tensor"):
        ours(make_input(kind).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_jit_script_is_refused_by_name(kind):
    """Its compiler would name a line inside flashcell. The alternative that the error names works."""
    model = Model(getattr(nn, kind)(4, 6))
    want = model(make_input(kind)).shape
    flashcell.replace(model)
    with pytest.raises(NotImplementedError, match=f"cannot compile flashcell's {kind}: use"):
        torch.jit.script(model)
    flashcell.restore(model)
    torch.jit.script(model.recurrent)
    assert model(make_input(kind)).shape == want


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_are_those_of_differences(kind, frozen):
    """Forward mode, also with frozen weights and no_grad, where a tangent could get lost."""
    module = getattr(flashcell, kind)(4, 6, dtype=torch.float64).requires_grad_(not frozen)
    x = make_input(kind).double()
    t, size = torch.randn_like(x), 1e-6
    run = lambda x: flatten(module(x))[0]
    with torch.no_grad():
        want = (run(x + size * t) - run(x - size * t)) / (2 * size)
    with forward_ad.dual_level():
        got = [forward_ad.unpack_dual(run(forward_ad.make_dual(x, t))).tangent]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got.append(torch.func.jvp(run, (x,), (t,))[1])
    for tangent in got:
        torch.testing.assert_close(tangent, want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_export_leaves_the_batch_open(kind, states, strict):
    """No size in the program is bounded, as none is in torch.nn's."""
    module = getattr(flashcell, kind)(4, 6, backend="cpu")
    at = 0 if kind in CELLS else 1

    def arguments(batch):
        s = torch.randn(*(() if kind in CELLS else (1,)), batch, 6)
        hx = ((s, s + 1) if "LSTM" in kind else s,) if states else ()
        return make_input(kind, batch), *hx

    shapes = torch.utils._pytree.tree_map(lambda _: {at: torch.export.Dim("batch")}, arguments(3))
    program = torch.export.export(module, arguments(3), dynamic_shapes=shapes, strict=strict)
    (bounds,) = program.range_constraints.values()
    assert bounds.upper > 2**60
    for batch in (2, 3, 17):
        given = arguments(batch)
        want, found = flatten(module(*given)), flatten(program.module()(*given))
        assert_same(dict(enumerate(found)), dict(enumerate(want)), 1e-6)
