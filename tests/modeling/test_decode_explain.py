"""`decoder.explain()` and `decoder.assume_unchanged()`: what is said of a token, and what is promised."""

import itertools
import threading

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from cases import DEVICE
from decode_cases import decode, greedy, same_as_plain
from flashcell.generation.decode_path import ROWS, Decision, decide_loop
from flashcell.generation.engine import LOOK
from flashcell.generation.fingerprint import Fingerprint
from model_cases import cpu_only

RECORDED = "tape" if DEVICE == "cpu" else "graph"


@pytest.fixture
def compared(monkeypatch):
    """Counts how often a model is compared with its fingerprint."""
    calls, holds = [], Fingerprint.holds
    monkeypatch.setattr(Fingerprint, "holds", lambda *args: calls.append(1) or holds(*args))
    return calls


def lines(model, batch=1):
    token, last, *blocks = model.decoder.explain(batch).splitlines()
    return token, last, dict(line.split(maxsplit=1) for line in blocks)


def test_explain_says_what_will_run(case, make_model, tokens):
    model = make_model(case)
    token, last, blocks = lines(model, 2)
    assert token == f"a token of batch 2 on {model.device}: {RECORDED}"
    assert last == "the last token: none yet"
    assert len(blocks) == model.config.num_hidden_layers + 1
    assert not model.decoder._recordings, "nothing is recorded for an explanation"
    greedy(model, tokens(2, 5))
    assert model.decoder.path == RECORDED
    assert lines(model)[1] == f"the last token: {RECORDED}"


@cpu_only
def test_explain_names_each_block(make_model):
    model = make_model("lstm")
    _, _, blocks = lines(model)
    first, second, head = blocks.values()
    assert first == second == "block_step"
    assert head == "linear_step"
    assert f"more than {ROWS} rows" in lines(model, ROWS + 1)[2]["lm_head"]
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    token, _, blocks = lines(model)
    assert token.endswith("plain, because Linear has hooks")
    assert list(blocks.values()) == [first, "modules, because Linear has hooks", head]
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp)
    assert "another class" in lines(model)[2]["layers.0"]
    diagonal = lines(make_model("flash_gru"))[2]
    assert diagonal["layers.0"].startswith("linear_step, because the cell is diagonal")
    assert "no fused step" in lines(make_model("flash_xlstm"))[2]["layers.0"]


@cpu_only
def test_explain_takes_any_model_and_no_empty_batch(make_model):
    model = make_model("lstm")
    model.lm_head = nn.Sequential(model.lm_head)
    assert lines(model)[2]["lm_head"].startswith("modules, because Sequential is another module")
    for batch in (0, -1):
        with pytest.raises(ValueError, match=f"batch is {batch}, but must be at least 1"):
            model.decoder.explain(batch)
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert "meta has no graphs" in lines(empty)[0]
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), torch.device("meta"):
        for _ in range(2):
            logits = empty(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache).logits
    assert (logits.is_meta, empty.decoder.path) == (True, "plain")


@pytest.mark.parametrize("what", ["eager", "training", "reference"])
def test_explain_says_why_not(make_model, what):
    model = make_model()
    if what == "training":
        model.train()
    elif what == "eager":
        model.decoder.mode = "eager"
    else:
        model.config.backend = "reference"
        if DEVICE != "cpu":
            return
    assert f"plain, because {'the torch' if what == 'reference' else ''}" in lines(model)[0]
    assert what in lines(model)[0]


def test_a_static_cache_is_named(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    greedy(model, ids)
    options = {"cache_implementation": "static", "disable_compile": True}
    greedy(model, ids, **options)
    assert model.decoder.path == "plain"
    assert "StaticCache" in model.decoder.reason


class OwnCriterion(StoppingCriteria):
    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **_):
        self.act(ids)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class OwnProcessor(LogitsProcessor):
    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores):
        self.act(ids)
        return scores


class OwnCache(DynamicCache):
    reorders = 0

    def reorder_cache(self, beams):
        self.reorders += 1
        self.act(torch.zeros(1, 5 + self.reorders))
        super().reorder_cache(beams)


def own_cache(model, act):
    cache = OwnCache(config=model.config)
    cache.act = act
    return cache


def own_method(model, act):
    cache = DynamicCache(config=model.config)
    lengths = itertools.count(6)

    def reorder(beams):
        act(torch.zeros(1, next(lengths)))
        DynamicCache.reorder_cache(cache, beams)

    cache.reorder_cache = reorder
    return cache


WAYS = {
    "4 beams": {"num_beams": 4},
    "a dict": {"return_dict_in_generate": True, "output_scores": True},
    "sampling to an end": {"do_sample": True, "eos_token_id": 1},
    "greedy": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_compares_a_model_every_so_many_tokens(make_model, tokens, compared, way):
    model, ids = make_model(), tokens(2, 5)
    greedy(model, ids, **WAYS[way])
    compared[:] = []
    greedy(model, ids, new=40, min_new_tokens=40, **WAYS[way])
    assert model.decoder.path == RECORDED
    assert 2 <= len(compared) <= 3


BETWEEN = {
    "a criterion": lambda m, act: {"stopping_criteria": StoppingCriteriaList([OwnCriterion(act)])},
    "a processor": lambda m, act: {"logits_processor": LogitsProcessorList([OwnProcessor(act)])},
    "a cache's class": lambda m, act: {"past_key_values": own_cache(m, act)},
    "a cache's method": lambda m, act: {"past_key_values": own_method(m, act)},
}


@pytest.mark.parametrize("way", ["4 beams", "a dict"])
@pytest.mark.parametrize("place", BETWEEN)
def test_code_between_two_tokens_may_change_the_model(make_model, tokens, place, way):
    """The recorded step has the old head."""
    if place.startswith("a cache") and way == "a dict":
        pytest.skip("only beams are reordered")
    ids, got = tokens(2, 5), {}
    for mode in ("auto", "eager"):
        torch.manual_seed(0)
        model = make_model()
        greedy(model, ids, **WAYS[way])
        model.decoder.mode, calls = mode, []

        def act(text, model=model, calls=calls):
            calls.append(1)
            if text.shape[1] == 9:
                model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())

        options = {**WAYS[way], **BETWEEN[place](model, act)}
        out = greedy(model, ids, **options)
        got[mode] = getattr(out, "sequences", out)
        assert calls
    assert torch.equal(got["auto"], got["eager"])


def test_a_promise_saves_the_comparison(make_model, tokens, compared):
    model, ids = make_model(), tokens(2, LOOK + 8)
    decode(model, ids[:, :3])
    cache, compared[:] = DynamicCache(config=model.config), []
    with model.decoder.assume_unchanged():
        got = decode(model, ids, cache)
    assert 1 <= len(compared) <= 3
    same_as_plain(model, lambda: decode(model, ids))
    assert torch.equal(got, decode(model, ids))


def test_a_broken_promise_is_noticed(make_model, tokens):
    model, ids = make_model(), tokens(1, 2 * LOOK + 4)
    cache = DynamicCache(config=model.config)
    with model.decoder.assume_unchanged():
        decode(model, ids[:, :4], cache)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
        decode(model, ids[:, 4 : LOOK + 4], cache)
        assert torch.equal(decode(model, ids[:, LOOK + 4 :], cache)[:, -1], same_last(model, ids))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    same_as_plain(model, lambda: decode(model, ids[:, :6]))


def same_last(model, ids):
    """The last logits of a model that reads its states, which no change of the head touches."""
    model.decoder.mode = "eager"
    try:
        return decode(model, ids)[:, -1]
    finally:
        model.decoder.mode = "auto"


def test_a_promise_is_one_thread_s_and_ends_with_its_block(make_model, tokens, compared):
    model, ids, errors = make_model(), tokens(1, 4), []
    decode(model, ids)

    def other():
        compared[:] = []
        decode(model, ids)
        if len(compared) < 3:
            errors.append(len(compared))

    def promised():
        with model.decoder.assume_unchanged():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            with model.decoder.assume_unchanged():
                pass
            compared[:] = []
            decode(model, ids)
            assert len(compared) <= 1, "the outer promise goes on"
            raise KeyError

    with pytest.raises(KeyError):
        promised()
    assert not errors
    other()
    assert not errors


def test_the_loop_is_decided_with_its_reason(make_model, tokens):
    model, ids = make_model(), tokens(1, 4)
    cache = DynamicCache(config=model.config)
    call = [model, ids, [], [], model.generation_config, cache, True, False]
    assert decide_loop(*call) == Decision("ahead")
    for place, value, reason in (
        (5, None, "no DynamicCache"),
        (6, False, "no DynamicCache"),
        (7, True, "several GPUs"),
        (2, [OwnProcessor(print)], "is the caller's"),
    ):
        path, said, _ = decide_loop(*call[:place], value, *call[place + 1 :])
        assert (path, reason in said) == ("base", True)
    model.register_forward_hook(lambda *_: None)
    assert "run around the model" in decide_loop(*call).reason
