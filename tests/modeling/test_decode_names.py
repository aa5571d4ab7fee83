"""Tests that decoding notices swapped parts of a model: functions with global names, and classes."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from decode_cases import decode, greedy, without_engine
from flashcell import modeling_flash_mlstm
from flashcell.generation.fingerprint import Fingerprint
from flashcell.layers import decode_linear
from model_cases import cpu_only


def scaled(owner, name, patch):
    function = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: 3 * function(*args, **kwargs))


def another_class(m, _):
    members = {"forward": lambda self, x: 3 * nn.Linear.forward(self, x)}
    m.lm_head.__class__ = type("Linear", (nn.Linear,), members)


def another_dict(m, _):
    m.model.norm.__dict__ = {**vars(m.model.norm), "eps": 0.5}


def another_configuration(m, _):
    m.config.__dict__ = {**vars(m.config), "gate_soft_cap": 0.5}


SWAPS = {
    "a norm": ("lstm", lambda m, p: scaled(nn.functional, "rms_norm", p)),
    "the embedding": ("lstm", lambda m, p: scaled(nn.functional, "embedding", p)),
    "an operator of torch's": ("lstm", lambda m, p: scaled(torch, "rms_norm", p)),
    "a method of tensors": ("flash_xlstm", lambda m, p: scaled(torch.Tensor, "__add__", p)),
    "a product": ("flash_xlstm", lambda m, p: scaled(nn.functional, "linear", p)),
    "an activation": ("flash_xlstm", lambda m, p: scaled(nn.functional, "silu", p)),
    "a function of ours": (
        "flash_mlstm",
        lambda m, p: scaled(modeling_flash_mlstm, "cast_once", p),
    ),
    "a way to multiply": (
        "lstm",
        lambda m, p: p.setattr(decode_linear, "find_step_linear", lambda *_: None),
    ),
    "a class": ("lstm", another_class),
    "all attributes": ("lstm", another_dict),
    "all of the configuration": ("flash_mlstm", another_configuration),
}
INERT = {"a function of ours", "a way to multiply"}  # without effect in some builds


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("prompted", [False, True])
def test_a_swap_is_seen_at_the_next_token(make_model, tokens, monkeypatch, swap, prompted):
    (case, change), ids, logits = SWAPS[swap], tokens(2, 8), {}
    for mode in ("eager", "auto"):
        torch.manual_seed(0)
        model = make_model(case)
        model.decoder.mode, cache = mode, DynamicCache(config=model.config)
        before = decode(model, ids)
        if prompted:
            greedy(model, ids)
        decode(model, ids[:, :4], cache)
        with monkeypatch.context() as patch:
            change(model, patch)
            logits[mode] = decode(model, ids[:, 4:], cache)
    assert torch.equal(logits["auto"], logits["eager"])
    assert swap in INERT or not torch.equal(logits["auto"], before[:, 4:])


def test_another_base_of_a_class_is_seen(make_model, tokens):
    ids, logits = tokens(2, 8), {}
    like_torch = {"__module__": nn.RMSNorm.__module__}
    forward = lambda self, x: 3 * nn.RMSNorm.forward(self, x)
    for mode in ("eager", "auto"):
        kind = type("RMSNorm", (nn.RMSNorm,), dict(like_torch))
        torch.manual_seed(0)
        model = make_model()
        model.decoder.mode, cache = mode, DynamicCache(config=model.config)
        model.model.norm.__class__ = kind
        before = decode(model, ids)
        decode(model, ids[:, :4], cache)
        kind.__bases__ = (type("Other", (nn.RMSNorm,), {**like_torch, "forward": forward}),)
        logits[mode] = decode(model, ids[:, 4:], cache)
    assert torch.equal(logits["auto"], logits["eager"])
    assert not torch.equal(logits["auto"], before[:, 4:])


@pytest.fixture
def compared(monkeypatch):
    """Counts how often the contents of a model's dicts were compared."""
    calls, compare = [], Fingerprint._compare
    spy = lambda self, model: calls.append(1) or compare(self, model)
    monkeypatch.setattr(Fingerprint, "_compare", spy)
    return calls


def test_only_a_change_makes_a_token_compare_dicts(case, make_model, tokens, compared):
    model, ids = make_model(case), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    decode(model, ids[:, :3], cache)
    (recording,), compared[:] = model.decoder._recordings.values(), []
    decode(model, ids[:, 3:6], cache)
    greedy(model, ids, num_beams=2)
    assert len(compared) <= 2, "generate prepares the model once"
    greedy(model, ids)
    compared[:] = []
    model.lm_head.note = 1
    del model.lm_head.note
    decode(model, ids[:, 6:9], cache)
    assert compared == [1]
    assert recording in model.decoder._recordings.values()


@pytest.mark.parametrize("place", ["attribute", "module", "class", "function", "configuration"])
def test_each_dict_is_compared_after_its_change(make_model, compared, monkeypatch, place):
    """Includes values that are put back before anybody looks."""
    model = make_model()
    name, owner = {
        "attribute": ("eps", vars(model.model.norm)),
        "module": ("norm", model.model._modules),
        "class": ("forward", nn.Linear),
        "function": ("rms_norm", vars(nn.functional)),
        "configuration": ("norm_eps", vars(model.config)),
    }[place]
    with torch.no_grad():
        fingerprint = Fingerprint(model, model.device)
        assert fingerprint.holds(model)
        assert not compared
        with monkeypatch.context() as patch:
            put = patch.setattr if place == "class" else patch.setitem
            put(owner, name, lambda *_: None)
            assert not fingerprint.holds(model)
        assert fingerprint.holds(model)
        assert compared == [1, 1]
        assert fingerprint.holds(model)
        assert compared == [1, 1]


def test_a_function_of_others_is_called_at_every_token(make_model, tokens, monkeypatch):
    """A function that others put in place of torch's, even before the first token, is called as often
    with the decode engine as without it."""
    calls, norm = [], nn.functional.rms_norm
    monkeypatch.setattr(nn.functional, "rms_norm", lambda *a, **k: calls.append(1) or norm(*a, **k))
    model, ids = make_model(), tokens(2, 6)
    decode(model, ids)
    assert __name__ in model.decoder.reason
    counted = len(calls)
    without_engine(model, lambda: decode(model, ids))
    assert len(calls) == 2 * counted > 0


@cpu_only
def test_a_token_that_is_refused_is_not_counted(make_model, tokens):
    model = make_model()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for token in tokens(2, 4).split(1, 1):
            model(token, past_key_values=cache)
        assert model.decoder.path == "tape"
        with pytest.raises(IndexError):
            model(torch.full((2, 1), 1000), past_key_values=cache)
    assert cache.get_seq_length() == 4


def test_one_layer_in_two_places(make_model, tokens):
    ids, logits = tokens(2, 6), {}
    for mode in ("eager", "auto"):
        torch.manual_seed(0)
        model = make_model()
        model.decoder.mode, cache = mode, DynamicCache(config=model.config)
        decode(model, ids[:, :4], cache)
        cache.layers[1] = cache.layers[0]
        logits[mode] = decode(model, ids[:, 4:], cache)
    assert torch.equal(logits["eager"], logits["auto"])
