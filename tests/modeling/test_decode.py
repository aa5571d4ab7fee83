"""Tests that the decode engine takes every step that it may, with bitwise the same results.

The CPU's tape has the same buffers as a GPU's graph, so errors with them (displaced caches,
beams, changed batches) show without a GPU; test_decode_cuda.py tests the graphs.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from decode_cases import CHANGES, greedy, without_engine
from flashcell.generation import captured_step
from flashcell.generation import engine as decode
from flashcell.generation.fingerprint import Fingerprint


@pytest.fixture
def steps(monkeypatch):
    """Records the batch sizes of the steps that the engine ran."""
    sizes, run = [], captured_step.Recording.run

    def counted(self, tokens, cache, take):
        sizes.append(len(tokens))
        return run(self, tokens, cache, take)

    monkeypatch.setattr(captured_step.Recording, "run", counted)
    return sizes


GENERATE = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "penalty": {"repetition_penalty": 1.5, "output_logits": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("kind", GENERATE)
def test_generate_is_the_same_with_the_engine(case, make_model, tokens, steps, kind):
    model, ids = make_model(case), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def text():
        torch.manual_seed(1)
        out = greedy(model, ids, attention_mask=mask, **GENERATE[kind])
        return out if torch.is_tensor(out) else torch.stack(out.logits)

    got = text()
    assert steps == [6 if kind == "beams" else 2] * 11
    assert torch.equal(got, without_engine(model, text))
    assert len(steps) == 11


def test_caches_of_one_batch_size_do_not_disturb_each_other(case, make_model, tokens):
    model, texts = make_model(case), tokens(2, 2, 9)

    def decode_in_turns():
        caches = [DynamicCache(config=model.config) for _ in texts]
        logits = []
        for t in range(9):
            for ids, cache in zip(texts, caches, strict=True):
                logits.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
            if t == 4:  # a copy made during decoding continues on its own
                caches[0] = copy.deepcopy(caches[0])
            if t == 6:
                caches[1].reorder_cache(torch.tensor([1, 0]))
        assert [c.get_seq_length() for c in caches] == [9, 9]
        return torch.stack(logits)

    with torch.no_grad():
        assert torch.equal(decode_in_turns(), without_engine(model, decode_in_turns))


def test_recordings_are_few_and_given_back(make_model, tokens):
    model = make_model()
    caches = []
    with torch.no_grad():
        for batch in range(1, decode.KEPT + 3):
            cache = model(tokens(batch, 3)).past_key_values
            model(tokens(batch, 1), past_key_values=cache)
            caches.append(cache)
            assert len(model.decoder._recordings) == min(batch, decode.KEPT)
        states = [s.clone() for s in caches[-1].layers[1].get_states()]
        ids, cache = tokens(len(caches), 1), copy.deepcopy(caches[-1])
        model.decoder.release()
        assert not model.decoder._recordings
        assert all(map(torch.equal, caches[-1].layers[1].get_states(), states))
        want = model(ids, past_key_values=cache).logits
        assert torch.equal(model(ids, past_key_values=caches[-1]).logits, want)
    model.double()  # fp32 states would be too coarse
    assert not model.decoder._recordings


def test_a_model_that_goes_takes_its_recordings_along(make_model, tokens):
    model = make_model()
    greedy(model, tokens(1, 3))
    buffer = weakref.ref(next(iter(model.decoder._recordings.values())).layers[0])
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert buffer() is None, "only the garbage collector frees the buffers"
    finally:
        gc.enable()


def test_copies_of_a_model_share_nothing(make_model, tokens):
    model, ids = make_model(), tokens(2, 4)
    want = greedy(model, ids)
    twin = copy.deepcopy(model)
    assert twin.decoder is not model.decoder
    assert not twin.decoder._recordings
    assert torch.equal(greedy(twin, ids), want)


def test_threads_take_turns(make_model, tokens):
    model, prompts = make_model(), [tokens(2, n) for n in (3, 4, 5, 6)]
    want, got = [greedy(model, p, new=40) for p in prompts], [None] * len(prompts)

    def run(i):
        got[i] = greedy(model, prompts[i], new=40)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, got, want))


def test_inference_mode_and_no_grad_mix(make_model, tokens):
    model, ids = make_model(), tokens(2, 4)
    want = greedy(model, ids)
    with torch.inference_mode():
        assert torch.equal(greedy(model, ids), want)
    assert torch.equal(greedy(model, ids), want)


REASONS = {
    "attention_mask is given": lambda m, ids: {"attention_mask": torch.ones_like(ids)},
    "position_ids is given": lambda m, ids: {"position_ids": torch.zeros_like(ids)},
    "labels is given": lambda m, ids: {"labels": ids},
    "output_hidden_states is given": lambda m, ids: {"output_hidden_states": True},
    "logits_to_keep is a tensor": lambda m, ids: {"logits_to_keep": torch.tensor([0])},
    "the model is training": lambda m, ids: m.train() and {},
    "gradients are recorded": lambda m, ids: (torch.set_grad_enabled(True) and None) or {},
}


@pytest.mark.parametrize("reason", REASONS)
def test_steps_that_are_left_to_the_model(make_model, tokens, steps, reason):
    model, ids = make_model(), tokens(2, 1)
    with torch.no_grad():
        cache = model(tokens(2, 3)).past_key_values
        given = REASONS[reason](model, ids)
        model(ids, past_key_values=cache, **given)
        assert model.decoder.reason == reason
    assert not steps


def test_autocast_is_left_to_the_model(make_model, tokens, steps):
    model = make_model()
    with torch.autocast(model.device.type, torch.bfloat16):
        greedy(model, tokens(1, 3))
    assert "autocast is on" in model.decoder.reason
    assert not steps


def test_modes(make_model, tokens):
    model = make_model()
    with pytest.raises(ValueError, match="mode is 'fast', but must be one of auto, graph, eager"):
        model.decoder.mode = "fast"
    if torch.get_default_device().type == "cpu":
        model.decoder.mode = "graph"
        with pytest.raises(RuntimeError, match='mode is "graph", but cpu has no graphs'):
            greedy(model, tokens(1, 3))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_a_graph_would_miss_are_seen(make_model, change):
    model = make_model()
    with torch.no_grad():
        fingerprint = Fingerprint(model, model.device)
        assert fingerprint.refusal is None
        assert fingerprint.holds(model)
        model.lm_head.weight.add_(1)  # a graph reads the weights where they are
        assert fingerprint.holds(model)
        CHANGES[change](model)
        assert not fingerprint.holds(model)


@pytest.mark.parametrize("when", ["within", "between"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_text_s_model_are_seen(make_model, tokens, change, when):
    """A change of the model is seen: within a text, when a streamer makes it, and between texts."""

    class Changes(BaseStreamer):
        def __init__(self, model, at):
            self.model, self.left = model, at

        def put(self, value):
            self.left -= 1
            if self.left == 0:
                CHANGES[change](self.model)
                with torch.no_grad():
                    for p in self.model.parameters():
                        p.mul_(-1.5)

        def end(self):
            pass

    def texts(mode):
        torch.manual_seed(0)
        model, ids = make_model(), tokens(2, 6)
        model.decoder.mode = mode
        changes = Changes(model, 6 if when == "within" else 0)
        first = greedy(model, ids, streamer=changes if when == "within" else None)
        if when == "between":
            changes.left = 1
            changes.put(None)
        return first, greedy(model, ids)

    (first, second), (plain_first, plain_second) = texts("auto"), texts("eager")
    # On a GPU the streamer gets a token some steps late, depending on its speed.
    if when == "between" or torch.get_default_device().type == "cpu":
        assert torch.equal(first, plain_first)
    assert torch.equal(second, plain_second)
    assert not torch.equal(first, second)


def test_what_a_recording_cannot_have(make_model):
    refusal = lambda model, device: Fingerprint(model, torch.device(device)).refusal
    model = make_model()
    assert refusal(model, "meta") == "not every weight is on meta, where the tokens are"
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert refusal(model, model.device) == "FlashRNNBlock has hooks"

    class Own(torch.nn.Linear):
        pass

    changes = {
        "Own is code of tests.modeling.": lambda m: setattr(m, "lm_head", Own(32, 61)),
        "Linear.forward is replaced": lambda m: setattr(m.lm_head, "forward", torch.sin),
        "RMSNorm.other is code of others": lambda m: setattr(m.model.norm, "other", lambda x: x),
        "FlashRNNForCausalLM.compute_logits is replaced": lambda m: setattr(
            m, "compute_logits", m.lm_head.forward
        ),
        "RMSNorm.scale is a tensor, but": lambda m: setattr(m.model.norm, "scale", torch.ones(3)),
    }
    for reason, change in changes.items():
        model = make_model()
        change(model)
        assert refusal(model, model.device).startswith(reason)


def test_hooks_of_output_hidden_states_are_idle(make_model, tokens):
    model = make_model()
    model(tokens(1, 3), output_hidden_states=True)
    assert model.model.layers[0]._forward_hooks, "transformers leaves none behind: drop this test"
    assert Fingerprint(model, model.device).refusal is None
