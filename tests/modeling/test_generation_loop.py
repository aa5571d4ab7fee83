"""Tests that our loop over tokens equals transformers': the same text, the same stream, the same
calls."""

import pytest
import torch
from transformers import GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from flashcell.generation.mixin import Ends, RecurrentGeneration, Text

NEW = 40


class Ears(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


def generate(model, ids, **options):
    ears = Ears()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    torch.manual_seed(1)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, streamer=ears, **options), ears.heard


@pytest.fixture
def both(make_model, tokens, monkeypatch):
    """Returns check(**options), which compares both loops, and asserts that the first was ours."""
    model, ids = make_model("lstm"), tokens(3, 6)
    ran, loop = [], RecurrentGeneration._sample_ahead

    def noted(self, *args):
        ran.append(True)
        return loop(self, *args)

    monkeypatch.setattr(RecurrentGeneration, "_sample_ahead", noted)

    def check(batch=3, **options):
        got = generate(model, ids[:batch], **options)
        assert ran, "another loop ran"
        with monkeypatch.context() as patch:
            patch.setattr(RecurrentGeneration, "_sample", GenerationMixin._sample)
            want = generate(model, ids[:batch], **options)
        assert torch.equal(got[0], want[0])
        assert got[1] == want[1]
        return got[0][:, 6:]

    check.model, check.ids = model, ids
    return check


@pytest.mark.parametrize("batch", [1, 3])
def test_ends(both, batch):
    """Ends at a token, at one of several, at different places in a batch, at the longest length
    alone."""
    text = both(batch)
    assert text.shape == (batch, NEW)
    for places in ([(0, 9)], [(0, 9), (batch - 1, 17)], [(0, 0)], [(0, NEW - 1)], [(0, NEW - 2)]):
        both(batch, eos_token_id=[int(text[place]) for place in places])
    early = both(1, eos_token_id=int(text[0, 9]))
    assert early.shape[1] <= 10
    both(batch, max_new_tokens=1, eos_token_id=int(text[0, 0]))


def test_all_rows_end_before_the_longest_length(both):
    text = both()
    ends = sorted({int(row[5]) for row in text})
    got = both(eos_token_id=ends)
    assert got.shape[1] <= 6
    assert got.shape[1] < NEW


def test_longer_than_what_waits(both):
    assert both(2, max_new_tokens=700).shape == (2, 700)


OTHERS = {
    "sampled": {"do_sample": True},
    "a processor": {"repetition_penalty": 1.5},
    "a processor and an end": {"min_new_tokens": 20, "eos_token_id": 3},
    "a forced end": {"forced_eos_token_id": 5, "eos_token_id": 5},
    "time": {"max_time": 1000.0, "eos_token_id": 7},
    "a second end": {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([8, 9])])},
    "an end without shape": {
        "stopping_criteria": StoppingCriteriaList([EosTokenCriteria(torch.tensor(8))])
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_than_the_usual_steps(both, kind):
    both(**OTHERS[kind])


def test_a_prompt_of_embeddings(both):
    model, ids = both.model, both.ids
    embeds = model.get_input_embeddings()(ids)
    options = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)}
    options |= {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**options), both(max_new_tokens=9))


def test_an_own_way_to_prepare_is_called(both, monkeypatch):
    """An override of prepare_inputs_for_generation gets the whole text, as in transformers."""
    model, lengths = both.model, []
    prepare = type(model).prepare_inputs_for_generation

    def own(ids, **kwargs):
        lengths.append(ids.shape[1])
        return prepare(model, ids, **kwargs)

    want = both(max_new_tokens=5)
    model.prepare_inputs_for_generation = own
    assert torch.equal(both(max_new_tokens=5), want)
    assert lengths == 2 * [6, 7, 8, 9, 10]


def test_what_is_usual():
    """Stopping criteria are `usual` if they are one maximal length and any number of end tokens, by
    transformers' own classes and no subclass."""
    ends = lambda *criteria: Ends(StoppingCriteriaList(criteria), torch.device("cpu"))

    class Own(EosTokenCriteria):
        pass

    length, end = MaxLengthCriteria(9), EosTokenCriteria(1)
    assert ends(length).usual
    assert ends(end, length, EosTokenCriteria([2, 3])).usual
    warns = MaxLengthCriteria(9, max_position_embeddings=4)
    unusual = [(end,), (length, length), (length, Own(1)), (warns,), (length, MaxTimeCriteria(1.0))]
    assert not any(ends(*criteria).usual for criteria in unusual)


def test_text():
    ids = torch.arange(6).view(2, 3)
    text, columns = Text(ids), torch.arange(600).view(2, 300)
    for t, column in enumerate(columns.unbind(1)):
        assert text.length == 3 + t
        text.add(column)
        if t in (0, 1, 100):
            assert torch.equal(text.read(), torch.cat([ids, columns[:, : t + 1]], 1))
    assert torch.equal(text.read(), torch.cat([ids, columns], 1))
