"""Tests a decoded block in one call on a CPU: same results, and no hook or replaced module is
bypassed."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from cases import DEVICE
from decode_cases import decode
from flashcell.layers.recurrent_mixer import RecurrentMixer
from numerics import assert_close

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the call is the CPU's")
CELLS = ["lstm", "gru", "rnn", "slstm"]


@pytest.fixture
def taken(monkeypatch):
    """Records the rows of every block that ran as one call."""
    rows, run = [], RecurrentMixer.block_step

    def counted(self, kernel, x, *rest):
        rows.append(len(x))
        return run(self, kernel, x, *rest)

    monkeypatch.setattr(RecurrentMixer, "block_step", counted)
    return rows


def by_the_modules(monkeypatch, model, ids):
    with monkeypatch.context() as patch:
        for block in model.model.layers:
            patch.setattr(type(block), "run_fused", lambda *_: None)
        return decode(model, ids)


@pytest.mark.parametrize("mode", ["auto", "eager"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("cell", CELLS)
def test_is_the_same_model(make_model, tokens, taken, monkeypatch, cell, batch, mode):
    model, ids = make_model("lstm", cell=cell), tokens(batch, 6)
    model.decoder.mode = mode
    got = decode(model, ids)
    assert taken == [batch] * (6 * model.config.num_hidden_layers)
    assert model.decoder.path == "plain", "`taken` is code of others in the step, so it is called"
    model.decoder.mode = "eager"
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_of_every_dtype(make_model, tokens, taken, monkeypatch, dtype):
    model, ids = make_model("lstm").to(dtype), tokens(3, 6)
    model.decoder.mode = "eager"
    got, peer = decode(model, ids), by_the_modules(monkeypatch, model, ids)
    assert taken
    want = decode(model.double(), ids)
    error, allowed = (float((y - want).square().mean().sqrt()) for y in (got, peer))
    assert error <= 1.5 * allowed + 1e-14


OWN_WAYS = {
    "hook": lambda b: b.mixer.in_proj.register_forward_hook(lambda m, x, y: 2 * y),
    "hook around": lambda b: b.mixer.register_forward_hook(lambda m, x, y: 2 * y),
    "pre-hook": lambda b: b.mlp.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
    "hook of the norm": lambda b: b.mixer_norm.register_forward_hook(lambda m, x, y: 2 * y),
    "forward replaced": lambda b: setattr(b.mlp, "forward", torch.zeros_like),
    "another norm": lambda b: setattr(b, "mlp_norm", nn.LayerNorm(32)),
    "another class": lambda b: setattr(b.mlp, "up_proj", nn.Sequential(b.mlp.up_proj, nn.Tanh())),
    "parametrized": lambda b: nn.utils.parametrizations.weight_norm(b.mlp.down_proj),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_module_with_its_own_way_is_called(make_model, tokens, taken, monkeypatch, way):
    model, ids = make_model("lstm"), tokens(2, 4)
    model.decoder.mode = "eager"
    OWN_WAYS[way](model.model.layers[0])
    got = decode(model, ids)
    assert len(taken) == 4, "the other block"
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)


def test_columns_are_not_read_as_rows(make_model, tokens, taken, monkeypatch):
    model, ids = make_model("lstm"), tokens(2, 4)
    model.decoder.mode = "eager"
    weight = model.model.layers[0].mixer.recurrent_weight
    weight.data = weight.data.mT.contiguous().mT
    got = decode(model, ids)
    assert len(taken) == 4, "the other block"
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)


def test_states_that_others_hold_stay(make_model, tokens):
    """A dynamic cache's states are replaced, not changed, and are cast if they have another dtype."""
    model, ids, cache = make_model("slstm"), tokens(2, 4), None
    model.decoder.mode, cache = "eager", DynamicCache(config=model.config)
    decode(model, ids, cache)
    held = [s for layer in cache.layers for s in layer.get_states()]
    before = [s.clone() for s in held]
    more = tokens(2, 3)
    want = decode(model, torch.cat([ids, more], 1))[:, 4:]
    assert_close("logits", decode(model, more, cache), want, 1e-6)
    assert all(map(torch.equal, held, before))
    wide = DynamicCache(config=model.config)
    decode(model, ids, wide)
    for layer in wide.layers:
        layer.map_states(torch.Tensor.double)
    assert_close("logits", decode(model, more, wide), want, 1e-6)
