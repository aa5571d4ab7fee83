"""A decoded token is what `forward` computes, whatever Python the model is at that moment: code around
the model runs around every token, code inside it is called, and changed values are seen at the next."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from cases import DEVICE
from decode_cases import decode, greedy, without_engine
from model_cases import VOCABULARY


def same_as_plain(model, work):
    """What the engine's recorded steps and the model called without it both give."""
    got = work()
    assert model.decoder.path in ("graph", "tape"), model.decoder.reason
    assert torch.equal(got, without_engine(model, work))
    return got


def doubled(forward):
    @functools.wraps(forward)  # generate asks for the names of its arguments
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
    """And their change of the logits counts: here a token that is never chosen."""
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
    """Of every module, without a call more to record a step, of no token that nobody generates."""
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
    """Calls a function when it hears of its fourth token."""

    def __init__(self, act):
        self.act, self.left = act, 4

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.act()

    def end(self):
        """Nothing to do."""


def check_patch(make, ids, patch, way, monkeypatch):
    """The same with the engine and without; returns whether the patch made a difference."""

    def run(mode):
        torch.manual_seed(3)
        model = make()
        model.decoder.mode = mode
        before = decode(model, ids)
        with monkeypatch.context() as context:
            if way == "within" and DEVICE == "cpu":  # a GPU's streamer hears of tokens later
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


def test_a_mode_of_the_caller_sees_every_op(make_model, tokens):
    class Counts(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    model, ids = make_model(), tokens(2, 6)
    decode(model, ids)

    def count():
        with Counts() as counts:
            logits = decode(model, ids)
        return torch.tensor(counts.seen), logits

    assert model.decoder.path != "plain"
    (seen, logits), (want, plain) = count(), without_engine(model, count)
    assert seen >= want > 100
    assert torch.equal(logits, plain)


def test_flags_of_torch_count(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    decode(model, ids)
    recorded = list(model.decoder._recordings.values())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
    try:
        same_as_plain(model, lambda: decode(model, ids))
    finally:
        torch.set_float32_matmul_precision(before)
    assert not any(r in recorded for r in model.decoder._recordings.values())


def test_a_shallow_copy_decodes_with_what_is_its_own(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    want = decode(model, ids)
    twin = copy.copy(model)
    twin._modules = dict(twin._modules)
    twin.lm_head = nn.Linear(32, VOCABULARY, bias=False)
    assert twin.decoder is not model.decoder
    got = same_as_plain(twin, lambda: decode(twin, ids))
    assert not torch.allclose(got, want)
    assert torch.equal(decode(model, ids), want)
    assert torch.equal(same_as_plain(twin, lambda: greedy(twin, ids)), greedy(twin, ids))


def test_a_replica_decodes_with_what_is_its_own(make_model, tokens):
    """As DataParallel makes them, for one call."""
    model, ids = make_model(), tokens(2, 5)
    want = decode(model, ids)
    replica = model._replicate_for_data_parallel()
    replica.lm_head = nn.Linear(32, VOCABULARY, bias=False)
    got = decode(replica, ids)
    with torch.no_grad():
        hidden = replica.model(ids, use_cache=True).last_hidden_state
        assert torch.allclose(got, replica.lm_head(hidden), atol=1e-5)
    assert not torch.allclose(got, want)


OFFLOADS = {
    "cpu_offload": lambda accelerate, m, path: accelerate.cpu_offload(m, execution_device=DEVICE),
    "disk_offload": lambda accelerate, m, path: accelerate.disk_offload(
        m, path, execution_device=DEVICE
    ),
    "embedding on disk": lambda accelerate, m, path: accelerate.dispatch_model(
        m,
        {"model.embed_tokens": "disk", "model.layers": DEVICE, "model.norm": DEVICE,
         "lm_head": DEVICE},
        main_device=DEVICE, offload_dir=path, force_hooks=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", OFFLOADS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_offloaded_weights_are_brought(make_model, tokens, tmp_path, way, options):
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model(), tokens(2, 5)

    def text():
        torch.manual_seed(0)
        return greedy(model, ids, **options)

    want = text()
    model = OFFLOADS[way](accelerate, model, str(tmp_path)) or model
    assert torch.equal(text(), want)
    assert model.decoder.path == "plain"


def test_path_and_reason_say_what_ran(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    assert (model.decoder.path, model.decoder.reason) == (None, None)
    greedy(model, ids)
    recorded = "tape" if DEVICE == "cpu" else "graph"
    assert (model.decoder.path, model.decoder.reason) == (recorded, None)
    without_engine(model, lambda: greedy(model, ids))
    assert (model.decoder.path, model.decoder.reason) == ("plain", 'mode is "eager"')
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    greedy(model, ids)
    assert model.decoder.path == "plain"
    assert "RMSNorm has hooks" in model.decoder.reason
    handle.remove()
    greedy(model, ids)
    assert (model.decoder.path, model.decoder.reason) == (recorded, None)


def test_a_model_that_changes_with_every_token_is_not_recorded_each_time(make_model, tokens):
    model, made = make_model(), []
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for t, token in enumerate(tokens(1, 12).split(1, 1)):
            model.model.norm.eps = 1e-6 * (t + 1)
            model(token, past_key_values=cache)
            made += [r for r in model.decoder._recordings.values() if r not in made]
    assert len(made) <= 1
    assert "has just changed" in model.decoder.reason


def test_every_family_keeps_its_recording(case, make_model, tokens):
    """Neither generate nor a step changes what a step reads, by which it would be recorded again."""
    model, ids = make_model(case), tokens(2, 5)
    greedy(model, ids)
    (first,) = model.decoder._recordings.values()
    greedy(model, ids, num_beams=1)
    greedy(model, ids, do_sample=True)
    decode(model, ids)
    model.generation_config.max_length = 77
    greedy(model, ids)
    with torch.inference_mode():
        greedy(model, ids)
    assert list(model.decoder._recordings.values()) == [first]
