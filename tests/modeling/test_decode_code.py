"""Tests that a decoded token is what `forward` computes, whatever Python the model is at that
moment: code around the model runs for every token, code inside it is called, and changed values
take effect at the next token."""

import functools

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from cases import DEVICE
from decode_cases import decode, greedy, same_as_plain, without_engine


def doubled(forward):
    @functools.wraps(forward)  # generate reads the names of its arguments
    def run(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs

    return run


SCORES = {"output_logits": True, "return_dict_in_generate": True}
WAYS = {
    "token by token": lambda model, ids: decode(model, ids),
    "greedy": lambda model, ids: greedy(model, ids, new=6),
    "scores": lambda model, ids: torch.stack(greedy(model, ids, new=6, **SCORES).logits),
    "beams": lambda model, ids: greedy(model, ids, new=6, num_beams=3),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_subclass_s_forward_runs_once_a_token(case, make_model, tokens, way):
    model, ids = make_model(case), tokens(2, 5)
    plain = WAYS["token by token"](model, ids)
    kind = type(model)

    class Own(kind):
        forward = doubled(kind.forward)

    model.__class__ = Own
    got = same_as_plain(model, lambda: WAYS[way](model, ids))
    if way == "token by token":
        assert torch.equal(got, 2 * plain)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_of_one_model_s_forward_runs_once_a_token(make_model, tokens, way):
    model, ids = make_model(), tokens(2, 5)
    plain = WAYS["token by token"](model, ids)
    model.forward = doubled(model.forward)
    got = same_as_plain(model, lambda: WAYS[way](model, ids))
    if way == "token by token":
        assert torch.equal(got, 2 * plain)


@pytest.mark.parametrize("when", ["before", "between"])
def test_hooks_of_the_model_hear_every_token(make_model, tokens, when):
    """A hook's change of the logits takes effect: here one token is never chosen."""
    model, ids, calls = make_model(), tokens(2, 5), []
    if when == "between":
        greedy(model, ids)

    def ban(module, args, outputs):
        calls.append(outputs.logits.shape[1])
        outputs.logits[..., banned] = -1e9
        return outputs

    banned = int(greedy(model, ids)[0, 7])
    handle = model.register_forward_hook(ban)
    text = greedy(model, ids)
    assert calls == [1] * 12, "the prompt's call and one a token"
    assert banned not in text[0, 5:]
    assert torch.equal(text, without_engine(model, lambda: greedy(model, ids)))
    handle.remove()
    greedy(model, ids)
    assert calls == [1] * 24


def test_hooks_hear_what_transformers_calls(case, make_model, tokens):
    """Hooks of every module, without an extra call to record a step and without calls for tokens
    nobody generates."""
    model, ids, heard = make_model(case), tokens(2, 5), []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, args, name=name: heard.append(name))
    end = int(greedy(model, ids[:1])[0, 9])
    del heard[:]
    greedy(model, ids[:1], eos_token_id=end)
    first, heard[:] = list(heard), []
    without_engine(model, lambda: greedy(model, ids[:1], eos_token_id=end))
    assert first == heard
    assert model.decoder.path == "plain"


def wraps(module, name="forward"):
    inner = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: 3 * inner(*args, **kwargs))


PATCHES = {
    "head's forward": lambda m, p: wraps(m.lm_head),
    "head's forward, of its class": lambda m, p: p.setattr(
        nn.Linear, "forward", lambda self, x: x @ self.weight.T * 3
    ),
    "an MLP's forward": lambda m, p: wraps(m.model.layers[0].mlp),
    "a block's forward": lambda m, p: wraps(m.model.layers[0]),
    "a block's run": lambda m, p: wraps(m.model.layers[0], "run"),
    "the logits": lambda m, p: wraps(m, "compute_logits"),
    "the logits, of the class": lambda m, p: p.setattr(
        type(m), "compute_logits", lambda self, x: 3 * self.lm_head(x)
    ),
    "a block's run, of its class": lambda m, p: p.setattr(
        type(m.model.layers[0]), "run", lambda self, x, cache, boundaries: x + 1
    ),
    "a norm's eps": lambda m, p: setattr(m.model.norm, "eps", 0.5),
    "a block's norm": lambda m, p: setattr(m.model.layers[1], "mlp_norm", nn.Identity()),
    "a hook for all modules": lambda m, p: p.setitem(
        nn.modules.module._global_forward_hooks,
        0,
        lambda m, x, y: y * 2 if torch.is_tensor(y) else y,
    ),
    "a dict of hooks": lambda m, p: (
        setattr(m.lm_head, "_forward_hooks", type(m.lm_head._forward_hooks)()),
        m.lm_head.register_forward_hook(lambda m, x, y: y * 2),
    ),
    "a transposed matrix": lambda m, p: transpose(m.model.layers[0].mlp.gate_proj.weight),
    "rows of the head": lambda m, p: setattr(m.lm_head.weight, "data", m.lm_head.weight.data[:50]),
}
CELL_PATCHES = {
    "the bound of a cell": ("flash_gru", lambda m: setattr(m.model.layers[0].mixer.cell, "max_recurrent", 0.1)),
    "the cap of logits": ("flash_mlstm", lambda m: setattr(m.config, "output_logit_soft_cap", 2.0)),
    "the cap of gates": ("flash_mlstm", lambda m: setattr(m.config, "gate_soft_cap", 0.5)),
    "an mLSTM's norm": ("flash_xlstm", lambda m: setattr(m.model.norm, "eps", 0.5)),
}  # fmt: skip


def transpose(weight):
    weight.data = weight.data.transpose(-1, -2)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("way", ["token by token", "within", "greedy"])
def test_a_patch_is_seen_at_the_next_token(make_model, tokens, monkeypatch, patch, way):
    make = lambda: make_model(intermediate_size=32)
    changed = check_patch(make, tokens(2, 8), PATCHES[patch], way, monkeypatch)
    assert changed or way != "token by token"


@pytest.mark.parametrize("patch", CELL_PATCHES)
def test_a_patch_of_a_family_is_seen(make_model, tokens, monkeypatch, patch):
    case, change = CELL_PATCHES[patch]
    make = lambda: make_model(case)
    ids, way = tokens(2, 8), "token by token"
    assert check_patch(make, ids, lambda m, p: change(m), way, monkeypatch)


class Acts(BaseStreamer):
    """A streamer that calls a function at its fourth token."""

    def __init__(self, act):
        self.act, self.left = act, 4

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.act()

    def end(self):
        """Does nothing."""


def check_patch(make, ids, patch, way, monkeypatch):
    """Compares the engine's results with those without it; returns whether the patch made a
    difference."""

    def run(mode):
        torch.manual_seed(3)
        model = make()
        model.decoder.mode = mode
        before = decode(model, ids)
        with monkeypatch.context() as context:
            if way == "within" and DEVICE == "cpu":  # a GPU's streamer gets tokens later
                streamer = Acts(lambda: patch(model, context))
                return before, greedy(model, ids[:1], streamer=streamer)
            if way == "greedy":
                greedy(model, ids)
                patch(model, context)
                return before, torch.stack(greedy(model, ids, **SCORES).logits)
            cache, logits = DynamicCache(config=model.config), []
            with torch.no_grad():
                for t, token in enumerate(ids.split(1, 1)):
                    if t == 4:
                        patch(model, context)
                    logits.append(model(token, past_key_values=cache).logits)
            assert torch.equal(torch.cat(logits[:4], 1), before[:, :4])
            return before[:, 4:], torch.cat(logits[4:], 1)

    (before, got), (_, want) = run("auto"), run("eager")
    assert torch.equal(got, want)
    return not torch.equal(got, before)
