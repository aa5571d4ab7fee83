"""Tests the digests by which a prompt finds the replica that has read its beginning."""

import json

import pytest

from flashcell.serving.replicas.beginnings import CHARACTERS, IDS, MOST, beginnings


def of_chat(*texts: str, first: str = "user") -> list[tuple[bytes, float]]:
    """Returns the beginnings of a chat whose speakers take turns."""
    roles = ("user", "assistant") if first == "user" else ("system", "user", "assistant")
    talk = [{"role": roles[at % len(roles)], "content": text} for at, text in enumerate(texts)]
    return beginnings(json.dumps({"messages": talk}).encode(), chat=True)


def of_prompt(prompt: object) -> list[tuple[bytes, float]]:
    return beginnings(json.dumps({"prompt": prompt}).encode(), chat=False)


def common(a: list, b: list) -> int:
    """Returns how many beginnings are the same, which must be the first ones."""
    same = {digest for digest, _ in a} & {digest for digest, _ in b}
    assert same == {digest for digest, _ in a[: len(same)]}
    return len(same)


def test_the_next_turn_begins_as_the_last():
    before, after = (
        of_chat("hello", "good day", "and?"),
        of_chat("hello", "good day", "and?", "x", "y"),
    )
    assert common(before, after) == 3
    assert common(before, of_chat("hello", "good day!", "and?")) == 1
    assert common(before, of_chat("hallo", "good day", "and?")) == 0
    assert common(of_chat("a", "b"), of_chat("a", "b", first="system")) == 0
    assert common(of_chat("ab", "c"), of_chat("a", "bc")) == 0


def test_the_answer_counts_with_its_question():
    """A replica that has read the question wrote the answer, however long that is."""
    shares = [share for _, share in of_chat("short", "long " * 100, "short")]
    assert shares[0] == shares[1] > 0.8
    assert shares[2] == 1
    alone = [share for _, share in of_chat("short", "long " * 100, first="system")]
    assert alone[0] < 0.2


@pytest.mark.parametrize("size", [CHARACTERS, IDS])
def test_prompts_are_cut_into_blocks(size):
    if size == CHARACTERS:
        first, same, other = (
            "a" * 2 * size + "bc",
            "a" * 2 * size + "d",
            "a" * size + "e" * 2 * size,
        )
    else:
        first, same, other = (
            [1] * 2 * size + [2, 3],
            [1] * 2 * size + [4],
            [1] * size + [5] * 2 * size,
        )
    found = of_prompt(first)
    assert [round(share, 3) for _, share in found] == [
        round(end / len(first), 3) for end in (size, 2 * size, len(first))
    ]
    assert common(found, of_prompt(same)) == 2
    assert common(found, of_prompt(other)) == 1
    assert of_prompt([first, other]) == found
    assert len(of_prompt(first * 2 * MOST)) == MOST


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": []}', b'{"prompt": ""}', b'{"messages": "x"}',
             b'{"messages": [1, null]}', b'{"prompt": [null]}', b'{"prompt": [{}]}', b"\xff"]
)  # fmt: skip
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_no_request_fails_nothing(body, chat):
    assert all(0 <= share <= 1 for _, share in beginnings(body, chat))
