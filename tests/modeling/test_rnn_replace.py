"""Tests replace(model), and what subclasses of torch.nn's modules keep: state dicts, pickles,
copies."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import flashcell
from cases import DEVICE
from torch_twins import (
    CELLS,
    EXACT,
    SAME,
    SEQUENCES,
    assert_same,
    flatten,
    make_inputs,
    make_twins,
    outputs,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")


class Custom(nn.LSTM):
    """A user's subclass with its own forward, whose behaviour is unknown."""

    def forward(self, input, hx=None):
        return super().forward(input, hx)


class Mode(nn.GRU):
    """A user's subclass with an attribute that torch.nn's forward does not read."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.mode = "train"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.blocks = nn.ModuleList([nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)])
        self.tied = self.blocks[0]
        self.decoder = nn.ModuleDict({"cell": nn.GRUCell(16, 16), "out": nn.LSTMCell(16, 4)})
        self.elman = nn.RNN(16, 16, nonlinearity="relu", batch_first=True)
        self.custom = Custom(16, 16, batch_first=True)

    def forward(self, x):  # [B, T, 6] -> [B, 4]
        x = self.blocks[1](self.blocks[0](self.encoder(x)[0])[0])
        x = self.custom(self.elman(self.tied(x)[0])[0])[0]
        return self.decoder["out"](self.decoder["cell"](x[:, -1]))[0]


def test_replaces_every_exact_type_in_place():
    model, x = Model().to(EXACT).eval(), torch.randn(3, 5, 6, dtype=EXACT)
    model.elman.train()
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append("forward"))
    model.encoder.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.encoder.note = "kept"
    before, parameters = model(x), dict(model.named_parameters())
    modules, shown = dict(model.named_modules()), repr(model)
    grads = torch.autograd.grad(before.sum(), list(parameters.values()))
    calls.clear()

    report = flashcell.replace(model)
    assert report.replaced == {
        "encoder": "LSTM",
        "blocks.0": "GRU",
        "decoder.cell": "GRUCell",
        "decoder.out": "LSTMCell",
        "elman": "RNN",
    }
    assert report.skipped == {"custom": "its class Custom has a forward of its own"}
    after = model(x)
    assert_same({"y": after.detach()}, {"y": before.detach()}, SAME)
    again = torch.autograd.grad(after.sum(), list(parameters.values()))
    assert_same(dict(enumerate(again)), dict(enumerate(grads)), SAME)
    assert calls == ["forward", "backward"]
    assert model.encoder.note == "kept"
    assert model.tied is model.blocks[0]
    assert repr(model) == shown
    assert dict(model.named_modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    kinds = {name: type(m) for name, m in model.named_modules()}
    wanted = {
        "encoder": flashcell.LSTM,
        "blocks.0": flashcell.GRU,
        "blocks.1": nn.Linear,
        "decoder.cell": flashcell.GRUCell,
        "decoder.out": flashcell.LSTMCell,
        "elman": flashcell.RNN,
        "custom": Custom,
    }
    assert {name: kinds[name] for name in wanted} == wanted
    assert [m.training for m in (model, model.encoder, model.elman)] == [False, False, True]
    flashcell.replace(model)
    assert {name: type(m) for name, m in model.named_modules()} == kinds


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_replaces_the_root(kind):
    theirs, _ = make_twins(kind, 6, 8, dtype=EXACT)
    x = torch.randn(3, 6, dtype=EXACT)
    want = outputs(theirs, x)
    report = flashcell.replace(theirs, backend="reference")
    assert report.replaced == {"": kind}
    assert type(theirs) is getattr(flashcell, kind)
    assert theirs.kernel_backend == "reference"
    assert_same(outputs(theirs, x), want, SAME)


def test_refuses_before_it_changes_anything():
    model = Model()
    with pytest.raises(ValueError, match="backend is 'gpu', but must be one of auto"):
        flashcell.replace(model, backend="gpu")
    with pytest.raises(TypeError, match="model is a list, but must be a torch"):
        flashcell.replace([model])
    assert type(model.encoder) is nn.LSTM


def test_parametrized_modules():
    torch.manual_seed(1)
    model = nn.Sequential(nn.LSTM(6, 8, 2, dtype=EXACT))
    parametrizations.weight_norm(model[0], "weight_hh_l0")
    parametrize.register_parametrization(model[0], "weight_ih_l1", nn.Tanh())
    x = torch.randn(5, 3, 6, dtype=EXACT)
    want, names = outputs(model, x), set(model.state_dict())
    flashcell.replace(model)
    assert isinstance(model[0], flashcell.LSTM)
    assert parametrize.is_parametrized(model[0])
    assert_same(outputs(model, x), want, SAME)
    assert set(model.state_dict()) == names
    loss = model(x)[0].square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    parametrize.remove_parametrizations(model[0], "weight_hh_l0")
    parametrize.remove_parametrizations(model[0], "weight_ih_l1")
    assert type(model[0]) is flashcell.LSTM
    assert_same(outputs(model, x), want, SAME)


def test_other_modules_stay():
    quantised = torch.ao.nn.quantized.dynamic.LSTM(4, 4)
    subclass, plain = Custom(4, 4), nn.TransformerEncoderLayer(4, 1)
    model = nn.ModuleList([quantised, subclass, plain])
    kinds = [type(m) for m in model.modules()]
    flashcell.replace(model)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("kind", SEQUENCES)
def test_state_dicts_go_both_ways(kind):
    kwargs = {"num_layers": 2, "bidirectional": True, "dtype": EXACT}
    if kind == "LSTM":
        kwargs["proj_size"] = 3
    theirs, ours = getattr(nn, kind)(6, 8, **kwargs), getattr(flashcell, kind)(6, 8, **kwargs)
    assert isinstance(ours, getattr(nn, kind))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    x, hx = make_inputs(ours, 3)
    ours.load_state_dict(theirs.state_dict())
    assert_same(outputs(ours, x, hx), outputs(theirs, x, hx), SAME)
    torch.manual_seed(2)
    ours.reset_parameters()
    torch.manual_seed(2)
    theirs.reset_parameters()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    theirs.load_state_dict(ours.state_dict())
    assert_same(outputs(ours, x, hx), outputs(theirs, x, hx), SAME)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_copies_and_pickles(kind):
    _, ours = make_twins(kind, 6, 8, 2, dtype=EXACT, backend="reference")
    x, hx = make_inputs(ours, 3)
    want = outputs(ours, x, hx)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert type(twin) is type(ours)
        assert twin.kernel_backend == "reference"
        assert_same(outputs(twin, x, hx), want, 0.0)
    moved = copy.deepcopy(ours).float().to(EXACT).requires_grad_(False)
    moved.load_state_dict(ours.state_dict())
    moved.flatten_parameters()
    assert_same(outputs(moved, x, hx), want, 0.0)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_functional_call_uses_the_weights_given(kind):
    theirs, ours = make_twins(kind, 6, 8, dtype=EXACT)
    x, hx = make_inputs(ours, 3)
    given = {name: p.detach() / 2 for name, p in ours.named_parameters()}
    got, want = (torch.func.functional_call(m, given, (x, hx)) for m in (ours, theirs))
    pairs = [dict(enumerate(t.detach() for t in flatten(value))) for value in (got, want)]
    assert_same(*pairs, SAME)


def test_nothing_keeps_a_module_alive():
    module = nn.LSTM(4, 4)
    flashcell.replace(module)
    module(torch.randn(2, 1, 4))[0].sum().backward()
    gone = weakref.ref(module)
    del module
    assert gone() is None


def test_a_mode_of_the_users():
    theirs = Mode(4, 6)
    ours, x = copy.deepcopy(theirs), torch.randn(5, 3, 4)
    assert flashcell.replace(ours).replaced == {"": "Mode"}
    packed = nn.utils.rnn.pack_sequence([x[:, 0], x[:3, 1]])
    for given in (x, x[:, 0], packed):
        pairs = [dict(enumerate(flatten(module(given)))) for module in (ours, theirs)]
        assert_same(*pairs, 1e-6)


def test_a_forward_in_the_place_of_torch_s_is_kept(monkeypatch):
    monkeypatch.setattr(nn.LSTM, "forward", lambda self, x, hx=None: "patched")
    for model in (nn.LSTM(4, 6), type("Sub", (nn.LSTM,), {})(4, 6)):
        report = flashcell.replace(model)
        assert "torch.nn.LSTM has another forward than torch's" in report.skipped[""]
        assert model(None) == "patched"


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_with_weights_of_another_size(kind):
    """torch.nn's cells take their sizes from the weights."""
    gates = {"LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}[kind]
    twins = make_twins(kind, 4, 6, dtype=EXACT)
    shapes = {"weight_ih": (gates * 7, 5), "weight_hh": (gates * 7, 7)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates * 7,))
    for name, shape in shapes.items():
        value = torch.randn(shape, dtype=EXACT)
        for module in twins:
            setattr(module, name, nn.Parameter(value.clone()))
    for batch in ((3,), ()):
        x, h = torch.randn(*batch, 5, dtype=EXACT), torch.randn(*batch, 7, dtype=EXACT)
        state = (h, h.cos()) if kind == "LSTMCell" else h
        pairs = [dict(enumerate(flatten(module(x, state)))) for module in twins]
        assert_same(*pairs, SAME)
    said = []
    for module in twins:
        for given in ((torch.randn(3, 5, dtype=EXACT),), (torch.randn(3, 4, dtype=EXACT), None)):
            with pytest.raises(RuntimeError) as caught:
                module(*given)
            said.append(str(caught.value))
    assert said[:2] == said[2:]
