"""Tests recorded steps that keep the last tokens in a ring (state/replay.py): the tokens, logits and
states are those of steps that write C, whoever reads the states and whenever.

On a CPU, where no model uses a ring, PyTorch code takes the place of the kernel.
"""

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from cases import DEVICE
from decode_cases import decode, greedy, without_engine
from flashcell import Request, generate_many
from flashcell.state import replay
from model_cases import state_tensors
from numerics import EPS, assert_close
from serving_cases import alone, collect

MLSTM = ["flash_mlstm", "flash_mlstm-sigmoid"]
SAME = 64 * EPS[torch.float32]  # of 40 tokens, whose states are summed in another order


@pytest.fixture(autouse=True)
def rings(monkeypatch):
    monkeypatch.setitem(replay.ROWS, DEVICE, 1)


@pytest.fixture(params=[*MLSTM, "flash_xlstm"])
def case(request):
    return request.param


def rings_of(model):
    layers = next(reversed(model.decoder._recordings.values())).layers
    return [layer.replay.ring for layer in layers if layer.replay is not None]


def check_same(cache, want):
    assert cache.get_seq_length() == want.get_seq_length()
    for ours, theirs in zip(*map(state_tensors, (cache, want)), strict=True):
        assert_close("states", ours, theirs, SAME)


def decoded(model, *texts):
    """Returns the logits and the cache after the texts, read token by token."""
    cache = DynamicCache(config=model.config)
    return [decode(model, ids, cache) for ids in texts], cache


def test_logits_and_states(case, make_model, tokens):
    """More tokens than a ring holds, read in the middle too."""
    model, texts = make_model(case), [tokens(3, n) for n in (21, 5, 18)]
    logits, cache = without_engine(model, lambda: decoded(model, *texts))
    rings = 1 if case == "flash_xlstm" else 2  # an sLSTM has none
    mine, unrecorded = DynamicCache(config=model.config), 1  # the first token of a cache
    for ids, want in zip(texts, logits, strict=True):
        assert_close("logits", decode(model, ids, mine), want, SAME)
        assert model.decoder.path in ("graph", "tape"), model.decoder.reason
        count = (ids.shape[1] - unrecorded - 1) % 16 + 1
        assert [ring.used.tolist() for ring in rings_of(model)] == [[[count] * 2] * 3] * rings
        copies = copy.deepcopy(mine)  # reads the states
        assert not any(ring.used.any() for ring in rings_of(model))
        unrecorded = 0
    check_same(copies, cache)
    check_same(mine, cache)


def test_generate(case, make_model, tokens):
    model, ids = make_model(case), tokens(3, 6)
    for way in ({}, {"num_beams": 3}, {"return_dict_in_generate": True}):
        run = partial(greedy, model, ids, new=10 if "num_beams" in way else 40, **way)
        got, want = run(), without_engine(model, run)
        if "return_dict_in_generate" in way:
            check_same(got.past_key_values, want.past_key_values)
            got, want = got.sequences, want.sequences
        assert torch.equal(got, want)
    assert rings_of(model)


@pytest.mark.parametrize("case", MLSTM)
def test_crop(case, make_model, tokens):
    """Tokens in the ring are taken back, without states kept for it; others are not."""
    model, ids = make_model(case), tokens(2, 30)
    _, cache = decoded(model, ids[:, :22])  # 21 of them recorded, 5 in the ring
    cache.crop(-2)
    cache.crop(torch.tensor(-2))
    assert cache.get_seq_length() == 18
    used = [ring.used for ring in rings_of(model)]
    assert len(used) == 2
    assert all(bool((counts == 1).all()) for counts in used)
    with pytest.raises(RuntimeError, match=r"-2, but must be 0: .* activate_past_recording"):
        cache.crop(-2)
    got = decode(model, ids[:, 22:], cache)
    text = torch.cat([ids[:, :18], ids[:, 22:]], 1)
    (_, want), other = without_engine(model, lambda: decoded(model, text[:, :18], text[:, 18:]))
    assert_close("logits", got, want, SAME)
    check_same(cache, other)
    cache.crop(0)
    with pytest.raises(RuntimeError, match="activate_past_recording"):  # reading has folded them
        cache.crop(-1)


def test_crop_where_other_states_changed(make_model, tokens):
    """A layer of sLSTM has no ring, and another cache's layer has left the buffers."""
    model, ids = make_model("flash_xlstm", slstm_at=[1]), tokens(2, 6)
    _, cache = decoded(model, ids)
    for layer in cache.layers:
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            layer.crop(-1)
    model = make_model("flash_mlstm")
    _, cache = decoded(model, ids)
    cache.layers[1].get_states()
    for layer in cache.layers:
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            layer.crop(-1)


def test_two_caches_of_one_size(case, make_model, tokens):
    """The ring of a cache that is no longer there is not the next one's."""
    model, ids, others = make_model(case), tokens(2, 9), tokens(2, 12)
    wants = without_engine(model, lambda: [decoded(model, t)[0][0] for t in (ids, others)])
    for _ in range(2):
        for text, want in zip((ids, others), wants, strict=True):
            (got,), _ = decoded(model, text)
            assert_close("logits", got, want, SAME)
    mine, theirs = (DynamicCache(config=model.config) for _ in range(2))
    for t in range(9):
        for text, cache, want in zip((ids, others), (mine, theirs), wants, strict=True):
            assert_close(
                "logits", decode(model, text[:, t : t + 1], cache), want[:, t : t + 1], SAME
            )


def test_requests_come_and_go(case, make_model, tokens):
    """Rows whose rings fold at different times. The second three begin where the first left theirs,
    and their states are given out at the end."""
    model, given = make_model(case), {}
    prompts = [tokens(n) for n in (3, 20, 7, 11, 5, 1)]
    lengths = [40, 7, 21, 30, 17, 25]
    keep = lambda k, ids, state: given.update({k: (ids, state)})
    requests = [
        Request(prompt, new, on_state=partial(keep, k) if k >= 3 else None)
        for k, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
    ]
    got = collect(generate_many(model, requests, slots=3))
    assert rings_of(model)
    for index, (prompt, new) in enumerate(zip(prompts, lengths, strict=True)):
        assert got[index] == without_engine(model, partial(alone, model, prompt, new=new)), index
        if index < 3:
            continue
        ids, state = given[index]
        want = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[None].to(model.device), past_key_values=want)
        for ours, theirs in zip(*map(state_tensors, (state, want)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
