"""Tests quantize_dynamic: the quantised modules are what torch makes of its own with the same weights."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from torch_twins import CELLS, SEQUENCES, flatten, make_twins

quantization = pytest.importorskip("torch.ao.quantization")
pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="torch's quantised modules run on the CPU"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
]
KINDS = ["LSTM", "GRU", *CELLS]
I, D = 8, 16


class Holder(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.recurrent = recurrent

    def forward(self, *args):
        return flatten(self.recurrent(*args))


def make_input(kind, batch=3):
    return torch.randn(batch, I) if kind in CELLS else torch.randn(5, batch, I)


def equal(one, other, *args):
    return all(map(torch.equal, one(*args), other(*args)))


def is_quantized(module) -> bool:
    return "quantized.dynamic" in type(module).__module__


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.2}])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_s(kind, options, dtype):
    if kind in CELLS and options:
        options = {"nonlinearity": "relu"} if kind == "RNNCell" else {}
    theirs, ours = map(Holder, make_twins(kind, I, D, **options))
    model = flashcell.quantize_dynamic(ours, dtype=dtype)
    want, x = quantization.quantize_dynamic(theirs, dtype=dtype), make_input(kind)
    assert is_quantized(model.recurrent)
    assert equal(model, want, x)
    rows = (3,) if kind in CELLS else (len(theirs(x)[1]), 3)
    h = torch.randn(*rows, D)
    assert equal(model, want, x, (h, h) if kind.startswith("LSTM") else h)
    assert isinstance(ours.recurrent, getattr(flashcell, kind))  # not in place
    assert not hasattr(ours.recurrent, "qconfig")


@pytest.mark.parametrize("kind", KINDS)
def test_without_biases(kind):
    """torch refuses them; they are biases of zero."""
    theirs, ours = getattr(nn, kind)(I, D), getattr(flashcell, kind)(I, D, bias=False)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.mul_(not name.startswith("bias"))
    want = quantization.quantize_dynamic(Holder(theirs))
    assert equal(flashcell.quantize_dynamic(Holder(ours)), want, make_input(kind))


class Tagger(nn.Module):
    class Encoder(nn.GRU):
        pass

    def __init__(self, library):
        super().__init__()
        self.lstm = library.LSTM(I, D, batch_first=True)
        self.parts = nn.ModuleDict(
            {"gru": library.GRU(D, D), "rnn": library.RNN(D, D), "own": self.Encoder(D, D)}
        )
        self.projected = library.LSTM(D, D, proj_size=4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.lstm(x)[0]
        for part in self.parts.values():
            x = part(x)[0]
        return self.head(self.projected(x)[0])


@pytest.mark.parametrize("inplace", [False, True])
def test_models(inplace, caplog):
    """What torch cannot quantise stays as it is, and is named; torch would compute a projected LSTM
    without its projection."""
    model = Tagger(nn)
    flashcell.replace(model)
    caplog.set_level(logging.WARNING, logger="flashcell")
    quantized = flashcell.quantize_dynamic(model, inplace=inplace)
    assert (quantized is model) == inplace
    done = {name for name, module in quantized.named_modules() if is_quantized(module)}
    assert {"lstm", "parts.gru", "head"} <= done
    assert not done & {"parts.rnn", "parts.own", "projected"}
    assert type(quantized.projected) is flashcell.LSTM
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    (text,) = [record.getMessage() for record in warnings]
    assert "parts.rnn (torch has no quantised class for its class RNN)" in text
    assert "parts.own (torch has no quantised class for its class Encoder)" in text
    assert "projected (proj_size is 4, but must be 0" in text
    assert quantized(torch.randn(2, 5, I)).shape == (2, 5, 2)
    assert not any(hasattr(module, "qconfig") for module in quantized.modules())
    assert "quantised" in str(flashcell.replace(quantized))


def test_spec_and_torch_s_own_function():
    make = lambda: nn.ModuleDict({"a": flashcell.LSTM(I, D), "b": flashcell.GRU(I, D)})
    quantized = lambda model: {name for name in model if is_quantized(model[name])}
    ours, own = flashcell.quantize_dynamic, quantization.quantize_dynamic
    per_channel = quantization.per_channel_dynamic_qconfig
    assert quantized(ours(make())) == {"a", "b"}
    assert quantized(ours(make(), {nn.LSTM})) == {"a"}
    assert quantized(ours(make(), {"b"})) == {"b"}
    assert quantized(ours(make(), {nn.GRU: per_channel, flashcell.LSTM: None})) == {"b"}
    assert quantized(ours(make(), mapping={})) == set()
    assert quantized(own(make(), {flashcell.LSTM})) == {"a"}
    assert quantized(own(make(), {"a", "b"})) == {"a", "b"}
    with pytest.raises(ValueError, match="proj_size is 2, but must be 0"):
        own(nn.Sequential(flashcell.LSTM(I, D, proj_size=2)), {flashcell.LSTM})


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_alone_and_its_copies(kind):
    module, x = getattr(flashcell, kind)(I, D), make_input(kind)
    quantized = flashcell.quantize_dynamic(module)
    assert is_quantized(quantized)
    want = flatten(quantized(x))
    other = flashcell.quantize_dynamic(getattr(flashcell, kind)(I, D))
    other.load_state_dict(quantized.state_dict())
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    copies = [other, copy.deepcopy(quantized), torch.load(file, weights_only=False)]
    if kind in SEQUENCES:  # the weights of torch's quantised cells are no objects that pickle takes
        copies.append(pickle.loads(pickle.dumps(quantized)))
    for each in copies:
        assert all(map(torch.equal, flatten(each(x)), want))


def test_parametrized_weights():
    module = flashcell.LSTM(I, D)
    nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    plain = nn.LSTM(I, D)
    plain.load_state_dict({name: getattr(module, name) for name in plain.state_dict()})
    want = quantization.quantize_dynamic(Holder(plain))
    assert equal(flashcell.quantize_dynamic(Holder(module)), want, make_input("LSTM"))


def test_refusals(caplog):
    with pytest.raises(TypeError, match=r"model is a int, but must be a torch\.nn\.Module"):
        flashcell.quantize_dynamic(3)
    for change, says in (
        ("double", "weight_ih_l0 is torch.float64 on cpu"),
        ("bfloat16", "bfloat16"),
    ):
        model = getattr(nn.Sequential(flashcell.LSTM(I, D)), change)()
        caplog.clear()
        assert type(flashcell.quantize_dynamic(model)[0]) is flashcell.LSTM
        assert says in caplog.text
    with pytest.raises(ValueError, match="how to quantize with default settings"):
        flashcell.quantize_dynamic(nn.Sequential(flashcell.LSTM(I, D)), dtype=torch.int8)


def test_within_drop_in():
    """Modules that are built there are flashcell's, those that torch quantises must be its own."""
    model = Holder(nn.LSTM(I, D))
    x = make_input("LSTM")
    wanted = flashcell.quantize_dynamic(model)(x)
    with flashcell.drop_in():
        found = flashcell.quantize_dynamic(model)(x)
    assert all(map(torch.equal, found, wanted))
