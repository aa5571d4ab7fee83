"""Tests drop_in: what torch.nn's constructors make inside it, in which thread, and what remains
afterwards."""

import asyncio
import logging
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import LSTM as imported_before

import flashcell
from cases import DEVICE
from flashcell.layers import replace, rnn
from torch_twins import CELLS, EXACT, SAME, SEQUENCES, OtherForward, Own, assert_same, outputs

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")


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
    assert [r.getMessage() for r in caplog.records if r.name == "flashcell.layers.replace"] == [
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
        """Constructs modules."""
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
    assert (build.__name__, build.__doc__) == ("build", "Constructs modules.")
    assert [type(m) for m in asyncio.run(both())] == [flashcell.LSTM, nn.LSTM]

    def generator():
        yield nn.LSTM(4, 6)

    for wrong in (generator, Own, 3):
        with pytest.raises(TypeError, match="function is a"):
            flashcell.drop_in()(wrong)


def test_drop_in_in_generators_that_overlap():
    """Blocks that end in another order than they began in are independent."""

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
    assert replace._blocks == 0
    assert type(nn.LSTM(4, 6)) is nn.LSTM


def test_drop_in_under_another_hook(monkeypatch):
    """Another library wraps the constructor inside the block, and removes the wrapper later."""
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
