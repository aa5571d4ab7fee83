"""Tests which choices of an answer are written, without a model or a server."""

import asyncio
from types import SimpleNamespace

import pytest

from flashcell.serving.engine import Answer
from flashcell.serving.text import TokenBytes, text_of


@pytest.mark.parametrize("completion", [None, "done"])
def test_a_choice_that_has_met_its_stop_string_is_written_once(completion):
    """The Batcher may give it more tokens until it hears of it."""
    ended = SimpleNamespace(fresh=[1], completion=completion, reason="stop")
    waiting = SimpleNamespace(fresh=[], completion=None, reason=None)
    goes_on = SimpleNamespace(fresh=[2], completion=None, reason=None)
    done = SimpleNamespace(fresh=[], completion="done", reason=None)
    answer = Answer([ended, waiting, goes_on, done])
    answer.ready.set()
    assert asyncio.run(answer.changed()) == [goes_on, done]


def test_the_space_before_a_word_belongs_to_its_token():
    """A decoder as SentencePiece's drops the space at the beginning of a text."""
    words = [" the", "the", "re", "\ufffd"]
    decode = lambda ids: "".join(words[i] for i in ids).removeprefix(" ")
    assert [text_of(decode, i) for i in range(4)] == words
    assert TokenBytes(None, decode)(0) == b" the"
