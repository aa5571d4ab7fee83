"""The second turn of a long chat through HTTP: how long its first token takes."""

import asyncio
import json
import statistics
import urllib.request
from typing import Any, NamedTuple

from .http_load import stream

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
ANSWER = 16  # tokens of the first turn's answer


class Turn(NamedTuple):
    first: float  # seconds to the first token
    prompt: int  # tokens of the whole chat
    read: int  # of these, those that no kept state held


def question(tokenizer: Any, tokens: int, number: int) -> str:
    """Returns a text of about so many tokens, which begins like no other number's."""
    line = " ".join(str((7 * i + number) % 900) for i in range(16)) + "\n"
    lines = -(-tokens // len(tokenizer(line)["input_ids"]))
    return f"{number}\n" + line * lines


def second_turn(url: str, model: str, asked: str, said: str, key: str | None = None) -> Turn:
    """Asks for an answer to a long text, and then for one to a few words more."""
    talk = [{"role": "user", "content": asked}]
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    about = {"model": model, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**about, "messages": talk}).encode()
    path = "/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as answer:
        text = json.loads(answer.read())["choices"][0]["message"]["content"]
    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    reader = asyncio.run(stream(url, path, {**about, **streamed, "messages": talk}, key))
    if reader.status != 200 or len(reader.times) < 3:
        raise SystemExit(f"scripts/load_test: the second turn got {reader.tail.decode()}")
    # The first event says who speaks, before any token.
    used = json.loads(reader.tail.split(b'"usage": ')[-1].split(b"}\n")[0])
    read = used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"]
    return Turn(reader.times[1] - reader.began, used["prompt_tokens"], read)


def second_turns(
    url: str, model: str, tokenizer: Any, tokens: int, said: str, times: int, key: str | None = None
) -> Turn:
    """Returns the medians of several chats."""
    turns = [
        second_turn(url, model, question(tokenizer, tokens, number), said, key)
        for number in range(times)
    ]
    return Turn(*(statistics.median(column) for column in zip(*turns, strict=True)))
