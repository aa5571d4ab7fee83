"""Tests that text made in pieces is the text made at once, and where stop strings end it."""

import random
from types import SimpleNamespace

import pytest

from flashcell.serving.text import UNFINISHED, Text, TokenBytes


@pytest.fixture
def decode(tokenizer):
    return lambda ids: tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)


def pieces(decode, tokens: list[int], sizes, prompt=(), stops=()) -> list[str]:
    text, given, at = Text(decode, prompt, stops), [], 0
    while at < len(tokens) or not given:
        size = next(sizes)
        given.append(text.add(tokens[at : at + size], last=at + size >= len(tokens)))
        at += size
        if text.stopped:
            break
    return given


def test_pieces_are_the_whole(decode, tokenizer):
    draw = random.Random(0)
    words = ["def ", "é", "日本", "🙂", "\n\n", "x", "ab ", "“”", "👩‍👩‍👧"]
    for i in range(300):
        written = "".join(draw.choices(words, k=draw.randrange(30)))
        tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
        if i % 3 == 2:  # and any tokens, which may be no whole characters
            tokens = [draw.randrange(3072) for _ in range(draw.randrange(40))]
        sizes = iter(lambda: draw.randrange(1, 4), None)
        got = pieces(decode, tokens, sizes, prompt=tokenizer("x = ")["input_ids"])
        if i % 3 < 2:
            assert "".join(got) == decode(tokens)
            assert not any(UNFINISHED in piece for piece in got)


def test_stop_strings_end_it_wherever_they_are_cut(decode, tokenizer):
    draw = random.Random(1)
    for _ in range(300):
        written = "".join(draw.choices("abcé \n", k=40))
        stops = ["".join(draw.choices("abcé \n", k=draw.randrange(1, 4))) for _ in range(3)]
        tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
        got = "".join(pieces(decode, tokens, iter(lambda: 1, None), stops=stops))
        ends = [(at + len(stop), at) for stop in stops if (at := written.find(stop)) >= 0]
        assert got == (written[: min(ends)[1]] if ends else written)


def test_bytes_that_are_no_character_are_not_kept_back_for_ever(decode, tokenizer):
    half = tokenizer("🙂", add_special_tokens=False)["input_ids"][:1]
    got = pieces(decode, half * 40, iter(lambda: 1, None))
    assert "".join(got) == decode(half * 40)
    assert sum(map(bool, got)) >= 2


def test_bytes_of_tokens_are_those_of_the_text(decode, tokenizer):
    token_bytes = TokenBytes(tokenizer, decode)
    written = "é日本🙂 def\n\t“x” \ufffd \x00\xad" + "".join(map(chr, range(0x400, 0x600, 7)))
    tokens = tokenizer(written)["input_ids"]
    assert any(UNFINISHED in decode([token]) for token in tokens)
    assert b"".join(map(token_bytes, tokens)) == written.encode()


@pytest.mark.parametrize(("name", "want"), [("<0xE9>", b"\xe9"), ("Ã", b"\xc3"), ("日", None)])
def test_bytes_by_the_name_of_a_token(name, want):
    """As SentencePiece and byte-level BPE write them, and None for what is neither."""
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token: name)
    assert TokenBytes(tokenizer, lambda ids: UNFINISHED)(0) == want
