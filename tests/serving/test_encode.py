"""Tests that a chat's tokens are the same whether the beginning of its text was seen before."""

import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flashcell.utils.encode import LEAST, Encoder, cuts_after_lines

WORDS = ["def ", "x", "  ", "\n", "\n\n", "\n    ", "\t", "é", "日本", "🙂", "1234567", "'s", "<|file|>",
         "_", " (", "\r\n", "\u0301", "\u00a0", "."]  # fmt: skip
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip


def split_by(pattern: str, tokenizer) -> PreTrainedTokenizerFast:
    """Returns the shipped tokenizer with another pattern."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("pattern", [None, GPT2, LLAMA3], ids=["shipped", "gpt2", "llama3"])
def test_tokens_are_those_of_the_whole_text(tokenizer, pattern):
    one = tokenizer if pattern is None else split_by(pattern, tokenizer)
    draw, encode = random.Random(0), Encoder(one)
    assert encode.remembers
    whole = lambda text: one(text, add_special_tokens=False)["input_ids"]
    for _ in range(60):
        text = "".join(draw.choices(WORDS, k=600))
        for _ in range(4):
            assert encode(text) == whole(text)
            other = text[: draw.randrange(len(text))] + "".join(draw.choices(WORDS, k=20))
            assert encode(other) == whole(other)
            text += "".join(draw.choices(WORDS, k=draw.randrange(400)))
    assert encode.known > 50_000, "nothing was looked up"


def test_tokenizers_that_do_not_cut_after_lines(tokenizer):
    joined = split_by(r"\n?\p{L}+|\s+|[^\s\p{L}]+", tokenizer)
    behind = split_by(r"(?<=a)b|\p{L}|\s+|[^\s\p{L}]+", tokenizer)
    metaspace = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    normal = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    normal.normalizer = normalizers.NFC()
    for backend in (joined.backend_tokenizer, behind.backend_tokenizer, metaspace, normal,
                    Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))):  # fmt: skip
        assert not cuts_after_lines(backend)
    text = "a\nb" * LEAST
    assert Encoder(joined)(text) == joined(text, add_special_tokens=False)["input_ids"]


def test_the_least_recently_used_go(tokenizer, monkeypatch):
    encode = Encoder(tokenizer)
    text = "x = 1\n" * LEAST
    encode("0" + text)
    size = encode.used
    monkeypatch.setattr("flashcell.utils.encode.BYTES", 3 * size + size // 2)
    for number in range(6):
        encode(f"{number}{text}")
    assert encode.used == 3 * size
    known = encode.known
    encode(f"1{text}")
    assert encode.known == known
    encode(f"5{text}")
    assert encode.known > known
