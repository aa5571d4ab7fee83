"""Tests replace's report, subclasses, and restore: which modules become flashcell's, and which come
back."""

import copy
import io
import logging
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import flashcell
from cases import DEVICE
from flashcell.hub import kernel_loader
from flashcell.layers import rnn
from torch_twins import (
    CELLS,
    EXACT,
    SAME,
    SEQUENCES,
    OtherForward,
    OtherOrder,
    Own,
    OwnCell,
    assert_same,
    make_twins,
    outputs,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")


def everything() -> nn.ModuleDict:
    torch.manual_seed(3)
    model = nn.ModuleDict({kind: getattr(nn, kind)(4, 6) for kind in SEQUENCES + CELLS})
    model["own"], model["cell"] = Own(4), OwnCell(4, 6)
    model["normed"] = parametrizations.weight_norm(nn.LSTM(4, 6), "weight_hh_l0")
    model["normed own"] = parametrizations.weight_norm(Own(4), "weight_ih_l0")
    return model.to(EXACT)


def test_report_and_log(caplog):
    scripted = torch.jit.script(nn.LSTM(4, 6))
    hooked = nn.LSTM(4, 6)
    hooked.forward = hooked.forward
    quantised = torch.ao.nn.quantized.dynamic.GRU(4, 6)
    ours = flashcell.GRU(4, 6)
    parts = [scripted, hooked, quantised, ours, OtherForward(4, 6), OtherOrder(4, 6), nn.RNN(4, 6)]
    model = nn.ModuleList([*parts, nn.Linear(4, 4)])
    with caplog.at_level(logging.INFO, "flashcell"):
        report = flashcell.replace(model)
    assert report.replaced == {"6": "RNN"}
    reasons = ["TorchScript", "forward was set on the object", "quantised", "flashcell's already"]
    reasons += [
        "OtherForward has a forward of its own",
        "OtherOrder has a permute_hidden of its own",
    ]
    assert list(report.skipped) == [str(k) for k in range(6)]
    for why, wanted in zip(report.skipped.values(), reasons, strict=True):
        assert wanted in why
    (record,) = [r for r in caplog.records if r.name == "flashcell.layers.replace"]
    assert (record.levelname, record.getMessage()) == ("WARNING", str(report))
    assert str(report).startswith(
        "1 of 7 recurrent modules became flashcell's; left as they are: 0"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "flashcell"):
        flashcell.replace(nn.LSTM(4, 6))
        flashcell.replace(ours)
        # Nothing was found, perhaps because it is the wrong model.
        flashcell.replace(nn.Linear(4, 4))
    assert [r.levelname for r in caplog.records if r.name == "flashcell.layers.replace"] == [
        "INFO",
        "INFO",
        "WARNING",
    ]


def test_replace_and_restore_change_the_class_alone():
    model, x = everything(), torch.randn(3, 4, dtype=EXACT)
    shown, kinds = repr(model), {name: type(m) for name, m in model.named_modules()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    call = lambda m: outputs(m, x[:, None] if isinstance(m, nn.RNNBase) else x)
    want = {name: call(module) for name, module in model.items()}
    report = flashcell.replace(model)
    assert set(report.replaced) == set(model)
    assert report.skipped == {}
    for name, module in model.items():
        assert isinstance(module, rnn._StandIn)
        assert isinstance(module, kinds[name].__mro__[1] if "normed" in name else kinds[name])
        assert_same(call(module), want[name], SAME)
    assert model["own"].describe() == "Own of 4"
    assert model["own"].backend == "gloo"
    assert repr(model) == shown
    assert flashcell.restore(model) == list(model)
    for name, module in model.named_modules():
        if "normed" in name and name in model:
            assert type(module).__mro__[1:] == kinds[name].__mro__[1:]
        else:
            assert type(module) is kinds[name]
        assert set(vars(module)) == attributes[name]
    assert all(p is parameters[name] for name, p in model.named_parameters())
    for name, module in model.items():
        assert all(map(torch.equal, call(module).values(), want[name].values()))
    assert flashcell.restore(model) == []
    flashcell.replace(model)
    assert isinstance(model["own"], rnn._StandIn)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 8), lambda: Own(4), lambda: OwnCell(4, 8)])
def test_copies_and_pickles_of_what_was_replaced(make):
    module = make()
    flashcell.replace(module, backend="reference")
    x = torch.randn(3, 4) if isinstance(module, OwnCell) else torch.randn(3, 2, 4)
    want, buffer = outputs(module, x), io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    twins = [pickle.loads(pickle.dumps(module, protocol)) for protocol in range(2, 6)]
    twins += [copy.deepcopy(module), copy.copy(module), torch.load(buffer, weights_only=False)]
    for twin in twins:
        assert type(twin) is type(module)
        assert isinstance(twin, rnn._StandIn)
        assert_same(outputs(twin, x), want, 0.0)
        assert flashcell.restore(twin) == [""]
        assert not isinstance(twin, rnn._StandIn)
        assert type(twin).__name__ == type(module).__name__
    assert isinstance(module, rnn._StandIn)


def test_restore_leaves_what_it_did_not_replace():
    made = flashcell.LSTM(4, 6)
    assert flashcell.restore(nn.ModuleList([made, nn.GRU(4, 6)])) == []
    assert type(made) is flashcell.LSTM
    model = nn.ModuleList([nn.LSTM(4, 6), nn.LSTM(4, 6)])
    flashcell.replace(model)
    model[1].forward = model[1].forward
    with pytest.raises(ValueError, match="1 has a forward that was set on the object after"):
        flashcell.restore(model)
    assert type(model[0]) is flashcell.LSTM
    with pytest.raises(TypeError, match="model is a dict, but must be a torch"):
        flashcell.restore({})


def test_parametrizations_may_change_in_between():
    model = nn.Sequential(nn.LSTM(4, 6))
    parametrizations.weight_norm(model[0], "weight_hh_l0")
    flashcell.replace(model)
    parametrizations.weight_norm(model[0], "weight_ih_l0")
    nn.utils.parametrize.remove_parametrizations(model[0], "weight_hh_l0")
    x = torch.randn(3, 2, 4)
    want = outputs(model, x)
    flashcell.restore(model)
    assert not isinstance(model[0], rnn._StandIn)
    assert_same(outputs(model, x), want, 1e-6)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight_ih_l0")
    assert type(model[0]) is nn.LSTM


@pytest.fixture
def without_kernel(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.setattr(kernel_loader, "_infos", {})
    monkeypatch.setattr(kernel_loader, "_modules", types.ModuleType("loaded_kernels"))
    monkeypatch.setattr(kernel_loader, "_warned", set())


def test_a_warning_says_what_runs_without_a_kernel(without_kernel, recwarn):
    """replace leaves torch.nn's forward in place and reports it; the modules warn when they are
    called."""
    model = nn.Sequential(nn.LSTM(4, 6))
    assert "no kernel here: " in str(flashcell.replace(model))
    with flashcell.drop_in():
        nn.GRUCell(4, 6)
    model(torch.randn(3, 2, 4))
    assert [str(w.message) for w in recwarn] == []
    module, cell, x = flashcell.LSTM(4, 6), flashcell.GRUCell(4, 6), torch.randn(3, 4)
    for _ in range(2):
        module(x), cell(x)
    (warning,) = recwarn
    assert str(warning.message).startswith("fused-rnn runs as torch.nn's own forward, because ")
    kernel_loader.load_kernel("fused-rnn", "cpu")
    assert str(recwarn[-1].message).startswith("fused-rnn runs as the torch reference, ")
    assert recwarn[-1].filename == __file__
    assert len(recwarn) == 2


@pytest.mark.filterwarnings("ignore:fused-rnn runs as torch.nn's own forward")
def test_without_a_kernel_torch_runs(without_kernel, monkeypatch):
    moved = nn.LSTM(4, 6)
    with torch.device("meta"):
        later = nn.LSTM(4, 6)  # like a model that is replaced on one device and moved to another
    assert flashcell.replace(later).replaced == {"": "LSTM"}
    later.to_empty(device="cpu").load_state_dict(moved.state_dict())
    monkeypatch.setattr(rnn, "run_sequence", None)
    x = torch.randn(3, 2, 4)
    assert all(map(torch.equal, outputs(later, x).values(), outputs(moved, x).values()))
    report = flashcell.replace(moved)
    assert type(moved) is nn.LSTM
    assert report.skipped[""].startswith("no kernel here: ")
    with flashcell.drop_in() as report:
        assert type(nn.GRU(4, 6)) is nn.GRU
    assert report.skipped["0"].startswith("no kernel here: ")
    with pytest.raises(kernel_loader.KernelUnavailable):
        flashcell.replace(nn.Sequential(moved), backend="cpu")


def test_twins_agree_after_a_round_trip():
    theirs, _ = make_twins("LSTM", 4, 6, 2, bidirectional=True, dtype=EXACT)
    x = torch.randn(5, 3, 4, dtype=EXACT)
    want = outputs(theirs, x)
    for _ in range(2):
        flashcell.replace(theirs)
        assert_same(outputs(theirs, x), want, SAME)
        flashcell.restore(theirs)
        assert_same(outputs(theirs, x), want, 0.0)


class Locked(nn.LSTM):
    """A module that refuses new attributes once it is made."""

    def __init__(self, *args):
        super().__init__(*args)
        vars(self)["locked"] = True

    def __setattr__(self, name, value):
        if vars(self).get("locked"):
            raise AttributeError(f"{name} is locked")
        super().__setattr__(name, value)


def test_a_subclass_that_takes_no_attributes_is_replaced_whole():
    model = nn.ModuleList([Locked(3, 4), nn.GRU(3, 4)])
    assert len(flashcell.replace(model).replaced) == 2
    assert isinstance(model[0], flashcell.LSTM)
    assert len(flashcell.restore(model)) == 2
    assert type(model[0]) is Locked


class Checked(nn.LSTM):
    def check_forward_args(self, *args):
        raise RuntimeError("checked")


def check_on_the_object():
    module = nn.LSTM(3, 4)
    module.check_forward_args = lambda *_: None
    return module


@pytest.mark.parametrize("make", [lambda: Checked(3, 4), check_on_the_object])
def test_own_checks_are_run_as_torch_runs_them(make):
    """A module with checks of its own stays torch.nn's, which passes them zeros if no state is given;
    flashcell makes no such zeros."""
    module = make()
    assert "check_forward_args" in flashcell.replace(module).skipped[""]
    assert not isinstance(module, flashcell.LSTM)


def test_an_interrupted_restore_can_be_repeated(monkeypatch):
    module = nn.LSTM(3, 4)
    flashcell.replace(module)
    with monkeypatch.context() as patch:
        patch.setattr("flashcell.layers.rnn_classes.set_class", interrupt)
        with pytest.raises(KeyboardInterrupt):
            flashcell.restore(module)
    assert flashcell.restore(module) == [""]
    assert type(module) is nn.LSTM
    assert "_replaced" not in vars(module)


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_class_that_came_after_is_not_lost():
    """torch's fully_shard derives a class, as here."""
    model = nn.Sequential(nn.LSTM(4, 6), nn.GRU(6, 6))
    flashcell.replace(model)
    sharded = model[1]
    sharded.__class__ = kind = type("ShardedGRU", (type(sharded),), {})
    with pytest.raises(ValueError, match="1 has the class ShardedGRU, which it got after it was"):
        flashcell.restore(model)
    assert type(sharded) is kind
    assert type(model[0]) is flashcell.LSTM
