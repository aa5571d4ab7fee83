"""Digests of the beginnings of a prompt, by which requests find the replica that has read them.

They are made of what the client sent, before any tokenizer: of a chat's messages, each with all
before it; of a text, or of token ids, in blocks.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from ..errors import ApiError
from ..fields import parse

CHARACTERS, IDS = 256, 64  # of a block
MOST = 1024  # beginnings of one prompt; what comes behind the last is not looked at
Beginning = tuple[bytes, float]  # its digest, and its share of the prompt


def beginnings(body: bytes, chat: bool) -> list[Beginning]:
    """Returns the beginnings of the first prompt in a body, the shortest first.

    The share of a message counts the answer behind it too: whoever has read it wrote that answer.
    There are none if the body is not a request: whichever replica gets it says why."""
    try:
        asked = parse(body)
    except ApiError:
        return []
    pieces = list(messages(asked.get("messages")) if chat else blocks(asked.get("prompt")))
    ends = list(accumulate(answer_end for _, answer_end in pieces))
    hashed, found = hashlib.sha256(), []
    for (piece, _), end in zip(pieces[:MOST], ends, strict=False):
        hashed.update(len(piece).to_bytes(8, "little") + piece)
        found.append((hashed.digest()[:16], end / ends[-1]))
    return found


def messages(value: Any) -> Iterator[tuple[bytes, int]]:
    """Yields every message, with its size and that of the answers right behind it; those have the
    size 0 themselves."""
    if not isinstance(value, list):
        return
    known = [one if isinstance(one, dict) else {} for one in value]
    raw = [json.dumps([one.get("role"), one.get("name"), one.get("content")]) for one in known]
    after_answer = False
    for at, text in enumerate(raw):
        size = 0 if after_answer else len(text)
        after_answer = False
        if size and at + 1 < len(known) and known[at + 1].get("role") == "assistant":
            size, after_answer = size + len(raw[at + 1]), True
        yield text.encode(), size


def blocks(value: Any) -> Iterator[tuple[bytes, int]]:
    """Yields the blocks of a prompt, the last of which may be short, with their sizes."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str | list):
        prompt, size = first, CHARACTERS if isinstance(first, str) else IDS
    else:
        prompt, size = value if isinstance(value, list) else "", IDS
    for at in range(0, len(prompt), size):
        block = prompt[at : at + size]
        yield json.dumps(block).encode(), len(block)
