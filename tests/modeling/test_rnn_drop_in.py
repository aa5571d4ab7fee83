"""replace's report, subclasses, restore, and drop_in: what becomes flashcell's, and what comes back."""

import abc
import asyncio
import copy
import io
import logging
import pickle
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import LSTM as imported_before
from torch.nn.utils import parametrizations

import flashcell
from cases import DEVICE
from flashcell import kernel_loader, rnn, rnn_replace
from torch_twins import CELLS, EXACT, SAME, SEQUENCES, assert_same, flatten, make_twins

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")


class Mixin(abc.ABC):
    @abc.abstractmethod
    def describe(self): ...


class Own(Mixin, nn.LSTM):
    """A class with a metaclass, methods and attributes, and torch's forward."""

    def __init__(self, width):
        super().__init__(width, 2 * width, batch_first=True)
        self.backend = "gloo"

    def describe(self):
        return f"{type(self).__name__} of {self.input_size}"


class OwnCell(nn.GRUCell):
    pass


class OtherForward(nn.GRU):
    def forward(self, input, hx=None):
        return super().forward(input, hx)


class OtherOrder(nn.RNN):
    def permute_hidden(self, hx, permutation):
        return hx


def outputs(module, *args) -> dict:
    return {k: t.detach() for k, t in enumerate(flatten(module(*args)))}


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
    (record,) = [r for r in caplog.records if r.name == "flashcell.rnn_replace"]
    assert (record.levelname, record.getMessage()) == ("WARNING", str(report))
    assert str(report).startswith(
        "1 of 7 recurrent modules became flashcell's; left as they are: 0"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "flashcell"):
        flashcell.replace(nn.LSTM(4, 6))
        flashcell.replace(ours)
        flashcell.replace(nn.Linear(4, 4))  # nothing was found: perhaps the wrong model
    assert [r.levelname for r in caplog.records if r.name == "flashcell.rnn_replace"] == [
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


@pytest.mark.filterwarnings("ignore:fused-rnn runs as the torch reference")
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


# drop_in


def test_drop_in_makes_ours(caplog):
    own_init = nn.RNNBase.__init__, nn.modules.rnn.RNNCellBase.__init__
    with caplog.at_level(logging.INFO, "flashcell"), flashcell.drop_in() as report:
        made = [getattr(nn, kind)(4, 6) for kind in SEQUENCES + CELLS]
        made += [imported_before(4, 6), nn.RNNCell(4, 6, nonlinearity="relu"), Own(4)]
        skipped = nn.utils.skip_init(nn.LSTMCell, 4, 6)
        other, direct = OtherForward(4, 6), flashcell.LSTM(4, 6, backend="reference")
    for kind, module in zip(SEQUENCES + CELLS, made, strict=False):
        assert type(module) is getattr(flashcell, kind)
        assert isinstance(module, getattr(nn, kind))
    assert type(made[6]) is flashcell.LSTM
    assert made[7].nonlinearity == "relu"
    assert isinstance(made[8], Own)
    assert isinstance(made[8], flashcell.LSTM)
    assert made[8].backend == "gloo"
    assert type(skipped) is flashcell.LSTMCell
    assert type(other) is OtherForward
    assert direct.kernel_backend == "reference"
    assert list(report.replaced.values()) == SEQUENCES + CELLS + [
        "LSTM",
        "RNNCell",
        "Own",
        "LSTMCell",
    ]
    assert report.skipped == {"10": "its class OtherForward has a forward of its own"}
    assert [r.getMessage() for r in caplog.records if r.name == "flashcell.rnn_replace"] == [
        str(report)
    ]
    assert type(nn.LSTM(4, 6)) is nn.LSTM
    assert (nn.RNNBase.__init__, nn.modules.rnn.RNNCellBase.__init__) == own_init
    for module in made:
        flashcell.restore(module)
        assert not isinstance(module, rnn._StandIn)


def test_drop_in_is_torch_s_module_with_another_forward():
    for kind in SEQUENCES + CELLS:
        torch.manual_seed(1)
        theirs = getattr(nn, kind)(4, 6, dtype=EXACT)
        torch.manual_seed(1)
        with flashcell.drop_in():
            ours = getattr(nn, kind)(4, 6, dtype=EXACT)
        assert repr(ours) == repr(theirs)
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        x = torch.randn(3, 4, dtype=EXACT)
        assert_same(outputs(ours, x), outputs(theirs, x), SAME)


def test_drop_in_nests_and_ends_with_an_exception():
    with flashcell.drop_in(backend="reference") as outer:
        with suppress(ZeroDivisionError), flashcell.drop_in(backend="cpu") as inner:
            assert nn.LSTM(4, 6).kernel_backend == "cpu"
            1 / 0  # noqa: B018
        assert nn.LSTM(4, 6).kernel_backend == "reference"
    assert (len(outer.replaced), len(inner.replaced)) == (1, 1)
    assert type(nn.LSTM(4, 6)) is nn.LSTM
    again = flashcell.drop_in()
    for _ in range(2):
        with again, pytest.raises(RuntimeError, match="entered already"):
            again.__enter__()
    with pytest.raises(ValueError, match="backend is 'gpu', but must be one of auto"):
        flashcell.drop_in(backend="gpu")


def test_drop_in_as_decorator():
    @flashcell.drop_in(backend="reference")
    def build(depth):
        """Builds."""
        return [nn.LSTM(4, 6), *(build(depth - 1) if depth else [])]

    @flashcell.drop_in()
    async def later():
        await asyncio.sleep(0)
        return nn.LSTM(4, 6)

    async def both():
        return await asyncio.gather(later(), plain())

    async def plain():
        return nn.LSTM(4, 6)

    assert [m.kernel_backend for m in build(2)] == ["reference"] * 3
    assert (build.__name__, build.__doc__) == ("build", "Builds.")
    assert [type(m) for m in asyncio.run(both())] == [flashcell.LSTM, nn.LSTM]

    def generator():
        yield nn.LSTM(4, 6)

    for wrong in (generator, Own, 3):
        with pytest.raises(TypeError, match="function is a"):
            flashcell.drop_in()(wrong)


def test_drop_in_in_generators_that_overlap():
    """Blocks that end in another order than they began in, each for itself."""

    def build(backend):
        with flashcell.drop_in(backend=backend):
            yield nn.LSTM(4, 6)
            yield nn.LSTM(4, 6)

    first, second = build("cpu"), build("reference")
    assert [next(g).kernel_backend for g in (first, second)] == ["cpu", "reference"]
    first.close()
    assert nn.LSTM(4, 6).kernel_backend == "reference"
    second.close()
    assert type(nn.LSTM(4, 6)) is nn.LSTM


def test_drop_in_is_of_its_thread():
    wrong, stop = [], threading.Event()

    def outside():
        while not stop.is_set():
            wrong.extend([] if type(nn.GRU(2, 2)) is nn.GRU else ["outside"])

    def inside():
        for _ in range(50):
            with flashcell.drop_in():
                wrong.extend([] if type(nn.GRU(2, 2)) is flashcell.GRU else ["inside"])

    threads = [threading.Thread(target=inside) for _ in range(3)]
    watcher = threading.Thread(target=outside)
    for thread in [watcher, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert wrong == []
    assert rnn_replace._blocks == 0
    assert type(nn.LSTM(4, 6)) is nn.LSTM


def test_drop_in_under_another_hook(monkeypatch):
    """Somebody wraps the constructor inside, and takes the wrapper off later."""
    block = flashcell.drop_in()
    block.__enter__()
    hook = nn.RNNBase.__init__
    monkeypatch.setattr(nn.RNNBase, "__init__", lambda *args, **kwargs: hook(*args, **kwargs))
    assert type(nn.LSTM(4, 6)) is flashcell.LSTM
    block.__exit__(None, None, None)
    assert type(nn.LSTM(4, 6)) is nn.LSTM
    with flashcell.drop_in() as report:
        assert type(nn.LSTM(4, 6)) is flashcell.LSTM
    assert len(report.replaced) == 1


def test_twins_agree_after_a_round_trip():
    theirs, _ = make_twins("LSTM", 4, 6, 2, bidirectional=True, dtype=EXACT)
    x = torch.randn(5, 3, 4, dtype=EXACT)
    want = outputs(theirs, x)
    for _ in range(2):
        flashcell.replace(theirs)
        assert_same(outputs(theirs, x), want, SAME)
        flashcell.restore(theirs)
        assert_same(outputs(theirs, x), want, 0.0)
