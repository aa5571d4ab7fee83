"""Tests that stacked layers as a wavefront compute the same as one after the other."""

from itertools import product

import pytest
import torch

from cases import DEVICE
from flashcell.kernels.fused_rnn import forward, stack
from numerics import assert_bitwise, rms
from torch_twins import EXACT, SAME, SEQUENCES, assert_same, compute, make_inputs, make_twins

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")


@pytest.fixture
def waves(monkeypatch):
    """Enables the wavefront on any device, and records the chunks that ran."""
    ran, run = [], stack.Engine.run_wavefront

    def recorded(self, *args):
        ran.append(args[-1])
        return run(self, *args)

    monkeypatch.setattr(stack.Engine, "run_wavefront", recorded)

    def enable(chunk: int) -> list[int]:
        monkeypatch.setattr(stack, "WAVE_DEVICES", ("cpu", "cuda") if chunk else ())
        monkeypatch.setattr(stack, "WAVE_CHUNK", chunk)
        monkeypatch.setattr(stack, "WAVE_MIN_CHUNKS", 1)
        monkeypatch.setattr(stack, "WAVE_MIN_WIDTH", 1)
        return ran

    return enable


@pytest.mark.parametrize("batched", [False, True], ids=["linear", "bmm"])
@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("layers", [2, 3, 5])
def test_same_as_one_after_the_other(kind, layers, batched, waves, monkeypatch):
    """The wavefront of layers and chunks computes what one layer after the other does: with fewer
    chunks than layers, with more, with steps left over, and with the products of CPU and CUDA."""
    extra = [{}, {"proj_size": 3}] if kind == "LSTM" else [{}]
    for T, kwargs, bias, states in product((3, 6, 7, 13), extra, (True, False), (True, False)):
        _, ours = make_twins(kind, 6, 8, layers, bias=bias, dtype=EXACT, **kwargs)
        x, hx = make_inputs(ours, 4, T, states)
        waves(0)
        want = compute(ours, x, hx)
        monkeypatch.setattr(stack, "LINEAR_DEVICES", () if batched else ("cpu",))
        ran = waves(3)
        got = compute(ours, x, hx)
        assert ran.pop() in (3, 4)
        assert not ran
        assert_same(got, want, SAME, (T, kwargs, bias, states))


@pytest.mark.parametrize("kind", SEQUENCES)
def test_gradients_in_16_bits_lose_nothing(kind, waves):
    """Sums over the waves are not rounded wave by wave: errors grow by at most 1.23 over 4 seeds,
    but by 2.7 if they are rounded."""
    theirs, ours = make_twins(kind, 32, 32, 3, dtype=torch.bfloat16, gain=1.0)
    x, hx = make_inputs(ours, 4, 512)
    waves(0)
    want = compute(ours, x, hx)
    ran = waves(16)
    got = compute(ours, x, hx)
    assert ran == [16]
    hx = hx.double() if torch.is_tensor(hx) else tuple(s.double() for s in hx)
    exact = compute(theirs.double(), x.double(), hx)
    for name in exact:
        assert got[name].dtype == torch.bfloat16
        if name.startswith("output"):
            assert_bitwise(name, got[name], want[name])
        apart, wave = (rms(g[name].double() - exact[name]) for g in (want, got))
        assert wave <= 1.5 * apart, f"{name}: error {wave:.3g}, one after the other {apart:.3g}"


@pytest.mark.parametrize("kind", SEQUENCES)
def test_dropout_between_layers(kind, waves, monkeypatch):
    """Every layer but the first reads what dropout leaves. With a probability of 1 that is nothing,
    and with a dropout that draws no numbers both orders compute the same."""
    theirs, ours = make_twins(kind, 6, 8, 3, dtype=EXACT, dropout=1.0)
    x, hx = make_inputs(ours, 4, 7, states=True)
    ran = waves(3)
    assert_same(compute(ours, x, hx), compute(theirs, x, hx), SAME, kind)
    monkeypatch.setattr(stack.F, "dropout", lambda x, p: torch.where(x > 0, x / p, 0))
    got = compute(ours, x, hx)
    assert len(ran) == 2
    waves(0)
    monkeypatch.setattr(forward, "is_plain", lambda *args: False)  # its dropout draws numbers
    assert_same(got, compute(ours, x, hx), SAME, kind)


def test_when_it_runs():
    usual = {"device_type": "cuda", "layers": 4, "heads": 1, "packed": False}
    usual |= {"B": 16, "T": 1024, "D": 512}
    choose = lambda **changed: stack.choose_chunk(**{**usual, **changed})
    assert choose() == choose(trains=True) == choose(B=64) == choose(D=1024) == 128
    assert choose(D=768) == choose(D=768, trains=True) == 512
    never = {
        "device_type": "cpu",
        "layers": 1,
        "heads": 2,
        "packed": True,
        "T": 511,
    }
    for name, value in {**never, "D": 1025}.items():
        assert choose(**{name: value}) == 0, name
    assert choose(D=128) == choose(D=768, B=17) == choose(D=1024, trains=True) == 0
    for T in range(512, 3000):
        chunk = choose(T=T)
        assert 112 <= chunk <= 144
        assert T % chunk < T // chunk
        assert T - 2 * choose(T=T, D=768) == T % 2


@pytest.mark.parametrize("change", [{"bidirectional": True}, {"num_layers": 1}])
def test_when_it_does_not(change, waves):
    ran = waves(3)
    _, ours = make_twins("GRU", 6, 8, **{"num_layers": 2, **change})
    ours(torch.randn(12, 2, 6))
    assert not ran
