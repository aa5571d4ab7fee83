"""Tests torch.onnx.export of the stand-ins: ONNX's own operators, whose results onnxruntime gives.

All cases are exported in one model by each exporter, with dynamic batch and time, because an export takes
seconds however small the model is."""

import io
import re
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import flashcell
from cases import DEVICE
from torch_twins import CELLS, flatten

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*(torch.onnx|batch_size other than 1).*:UserWarning"),
]
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

I, D = 4, 6
BOUND = 1e-5
DYNAMO, TRACED = "dynamo", "torchscript"
CASES = {
    "lstm": ("LSTM", {}),
    "lstm layers states": ("LSTM", {"num_layers": 3, "dropout": 0.5, "states": True}),
    "lstm bidirectional": ("LSTM", {"bidirectional": True}),
    "lstm bidirectional layers states": (
        "LSTM",
        {"bidirectional": True, "num_layers": 2, "batch_first": True, "states": True},
    ),
    "lstm no bias": ("LSTM", {"bias": False, "num_layers": 2}),
    "lstm unbatched": ("LSTM", {"unbatched": True}),
    "lstm unbatched states": ("LSTM", {"unbatched": True, "states": True, "batch_first": True}),
    "lstm projected": ("LSTM", {"proj_size": 3, "num_layers": 2}),
    "lstm projected states": (
        "LSTM",
        {"proj_size": 3, "num_layers": 2, "bidirectional": True, "states": True},
    ),
    "lstm projected no bias": ("LSTM", {"proj_size": 1, "bias": False, "unbatched": True}),
    "gru": ("GRU", {}),
    "gru states": ("GRU", {"states": True, "batch_first": True}),
    "gru bidirectional layers": ("GRU", {"bidirectional": True, "num_layers": 2, "dropout": 0.3}),
    "gru bidirectional states": ("GRU", {"bidirectional": True, "states": True}),
    "gru no bias": ("GRU", {"bias": False}),
    "gru unbatched": ("GRU", {"unbatched": True, "states": True}),
    "rnn": ("RNN", {}),
    "rnn relu": ("RNN", {"nonlinearity": "relu", "num_layers": 2}),
    "rnn relu bidirectional": (
        "RNN",
        {"nonlinearity": "relu", "bidirectional": True, "states": True},
    ),
    "rnn no bias": ("RNN", {"bias": False, "bidirectional": True}),
    "rnn unbatched": ("RNN", {"unbatched": True, "batch_first": True, "states": True}),
}


class Case(nn.Module):
    """A module called as its case says, with states from h and c [8, B, D]."""

    def __init__(self, kind, states=False, unbatched=False, **options):
        super().__init__()
        self.states, self.unbatched = states, unbatched
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.recurrent = getattr(nn, kind)(I, D, **options)

    def forward(self, x, h, c):
        module = self.recurrent
        rows = module.num_layers * (2 if module.bidirectional else 1)
        h, c = h[:rows, :, : module.proj_size or D], c[:rows]
        if self.unbatched:
            x, h, c = x[:, 0], h[:, 0], c[:, 0]
        elif module.batch_first:
            x = x.transpose(0, 1)
        hx = (h, c) if module.mode == "LSTM" else h
        return flatten(module(x, hx) if self.states else module(x))


class All(nn.Module):
    """Runs all cases; the number of their outputs is 2, or 3 for an LSTM."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(5)
        self.names = names
        self.cases = nn.ModuleList(
            [Case(kind, **options) for kind, options in map(CASES.get, names)]
        )

    def forward(self, x, h, c):
        return [value for case in self.cases for value in case(x, h, c)]


def draw(T, B):
    return torch.randn(T, B, I), torch.randn(8, B, D), torch.randn(8, B, D)


def export(model, inputs, exporter, axes=None):
    """Returns the ONNX model of `model`, and a function that runs it."""
    file, names = io.BytesIO(), [f"input_{k}" for k in range(len(inputs))]
    options = {"input_names": names, "verbose": False, "dynamo": exporter == DYNAMO}
    if exporter == DYNAMO and axes is not None:
        dims = {name: torch.export.Dim(name) for axis in axes for name in axis.values()}
        shapes = [{k: dims[name] for k, name in axis.items()} for axis in axes]
        options["dynamic_shapes"] = tuple(shapes)
    elif axes is not None:
        options["dynamic_axes"] = dict(zip(names, axes, strict=True))
    torch.onnx.export(model.eval(), inputs, file, **options)
    loaded = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(loaded)
    session = onnxruntime.InferenceSession(file.getvalue())
    wanted = {entry.name for entry in session.get_inputs()}
    run = lambda *given: [
        torch.from_numpy(value)
        for value in session.run(
            None, {n: v.numpy() for n, v in zip(names, given, strict=True) if n in wanted}
        )
    ]
    return loaded, run


def operators(model) -> list:
    return [node for node in model.graph.node if node.op_type in ("LSTM", "GRU", "RNN")]


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g - w).abs().max() < BOUND


def names_for(exporter) -> list[str]:
    """torch's old exporter takes no projection, see test_a_projection_is_refused."""
    return [n for n, (_, o) in CASES.items() if exporter == DYNAMO or "proj_size" not in o]


@cache
def exported(exporter):
    """The ONNX model of all cases, its operators by case, and its and torch.nn's results by case."""
    names = names_for(exporter)
    model = All(names).eval()
    given = draw(7, 5)
    with torch.no_grad():
        want = iter(model(*given))
        flashcell.replace(model, backend="reference")
    axes = [{0: "time", 1: "batch"}, {1: "batch"}, {1: "batch"}]
    loaded, run = export(model, draw(3, 2), exporter, axes)
    got, found, results, nodes = iter(run(*given)), iter(operators(loaded)), {}, {}
    for name, case in zip(names, model.cases, strict=True):
        count = 3 if case.recurrent.mode == "LSTM" else 2
        results[name] = [(next(got), next(want)) for _ in range(count)]
        nodes[name] = [next(found) for _ in range(case.recurrent.num_layers)]
    assert [next(it, None) for it in (got, want, found)] == [None] * 3
    return loaded, nodes, results


@pytest.mark.parametrize(
    ("exporter", "name"),
    [(exporter, name) for exporter in (DYNAMO, TRACED) for name in names_for(exporter)],
)
def test_round_trip(exporter, name):
    _, nodes, results = exported(exporter)
    assert_close(*zip(*results[name], strict=True))
    kind, options = CASES[name]
    for node in nodes[name]:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert node.op_type == kind
        assert attributes["hidden_size"] == D
        directions = {True: b"bidirectional", False: b"forward"}
        assert attributes.get("direction", b"forward") == directions["bidirectional" in options]
        assert attributes.get("linear_before_reset", 0) == (kind == "GRU")


@pytest.mark.parametrize("exporter", [DYNAMO, TRACED])
def test_graphs_hold_onnx_s_operators_alone(exporter):
    loaded, *_ = exported(exporter)
    assert {entry.domain for entry in loaded.opset_import} == {""}
    assert not {n.op_type for n in loaded.graph.node} & {"Loop", "Scan", "If", "Sigmoid", "Tanh"}


class Tagger(nn.Module):
    """A user's model around a subclass of torch.nn.LSTM and a cell."""

    class Encoder(nn.LSTM):
        pass

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, I)
        self.encoder = self.Encoder(I, D, batch_first=True, bidirectional=True)
        self.cells = nn.ModuleList(getattr(nn, kind)(2 * D, D) for kind in CELLS)
        self.head = nn.Linear(D, 3)

    def forward(self, tokens):
        y, (h, c) = self.encoder(self.embed(tokens))
        lstm, gru, rnn = self.cells
        last = lstm(y[:, -1])[0] + gru(y[:, -1], h[0]) + rnn(y[:, 0], c[1])
        return self.head(last)


@pytest.mark.parametrize("exporter", [DYNAMO, TRACED])
def test_replaced_models(exporter):
    """The model is the same afterwards: it runs our kernels and has its parameters."""
    model, tokens = Tagger().eval(), torch.randint(0, 10, (4, 9))
    want = model(tokens)
    flashcell.replace(model)
    before = dict(model.named_parameters())
    loaded, run = export(model, (tokens[:2, :3],), exporter, [{0: "batch", 1: "time"}])
    assert [node.op_type for node in operators(loaded)] == ["LSTM"]
    assert {entry.domain for entry in loaded.opset_import} == {""}
    assert_close(run(tokens), [want])
    assert all(value is before[name] for name, value in model.named_parameters())
    again = torch.export.export(model, (tokens,)).graph
    assert any("fused_rnn" in str(node.target) for node in again.nodes)


def test_parametrized_and_static():
    module = flashcell.GRU(I, D, num_layers=2, backend="cpu")
    nn.utils.parametrizations.weight_norm(module, "weight_hh_l1")
    x = torch.randn(3, 2, I)
    loaded, run = export(module, (x,), DYNAMO)
    assert [node.op_type for node in operators(loaded)] == ["GRU"] * 2
    assert_close(run(x), flatten(module(x)))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = flashcell.LSTM(I, D)

    def forward(self, x, lengths):
        y, _ = self.recurrent(pack_padded_sequence(x, lengths))
        return pad_packed_sequence(y)[0]


def test_packed_sequences():
    """torch's old exporter has lengths; its new one does not get as far as the operator."""
    model, x, lengths = Packed(), torch.randn(5, 3, I), torch.tensor([5, 4, 2])
    _, run = export(model, (x, lengths), TRACED)
    assert_close(run(x, lengths), [model(x, lengths)])
    with pytest.raises(Exception, match="input is a PackedSequence, but must be a tensor"):
        export(model, (x, lengths), DYNAMO)


@pytest.mark.parametrize(
    ("kind", "options", "arguments", "says"),
    [
        ("LSTM", {}, (torch.zeros(3, 2, I + 1),), "input.size(-1) must be equal to input_size"),
        ("GRU", {}, (torch.zeros(3, 2, I), torch.zeros(1, 3, D)), "Expected hidden size (1, 2, 6)"),
        (
            "LSTM",
            {},
            (torch.zeros(3, 2, I), torch.zeros(1, 2, D)),
            "hx has 1 tensors, but must be a",
        ),
        ("RNN", {}, (torch.zeros(1, 3, 2, I),), "input must have 3 dimensions, got 4"),
    ],
)
def test_wrong_arguments(kind, options, arguments, says):
    with pytest.raises(Exception, match=re.escape(says)):
        export(getattr(flashcell, kind)(I, D, **options), arguments, DYNAMO)


def test_a_projection_is_refused():
    """torch's old exporter names what it does not take; the new one exports it, see CASES."""
    with pytest.raises(Exception, match="LSTMs with projections"):
        export(flashcell.LSTM(I, D, proj_size=2), (torch.zeros(3, 2, I),), TRACED)


def test_no_onnx_export_is_no_change():
    """torch.export and torch.jit.trace keep our kernels."""
    module, x = flashcell.GRU(I, D, backend="cpu"), torch.randn(3, 2, I)
    nodes = torch.export.export(module, (x,)).graph.nodes
    assert not any("onnx" in str(node.target) for node in nodes)
    assert "fused_rnn" in str(torch.jit.trace(module, (x,)).inlined_graph)
