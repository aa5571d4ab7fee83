"""What clients get: OpenAI's objects for completions and chats, whole or in chunks."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from .engine import Answer, Choice
from .errors import ApiError
from .protocol import Asked
from .text import text_of

Decode = Callable[[list[int]], str]
END = b"data: [DONE]\n\n"


class Writer:
    """Writes the answer to one request."""

    def __init__(
        self, asked: Asked, answer: Answer, model: str, decode: Decode,
        token_bytes: Callable[[int], bytes | None], stop: Callable[[list[Choice]], None],
    ):  # fmt: skip
        self.asked, self.answer, self.decode = asked, answer, decode
        self.token_bytes = token_bytes
        self._stop = stop  # ends choices in the engine, whose text has come to a stop string
        kind, name = ("chat.completion", "chatcmpl") if asked.chat else ("text_completion", "cmpl")
        self.frame = {
            "id": f"{name}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if asked.chat and asked.stream else ""),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def whole(self) -> bytes:
        """Waits for the end of all choices; returns the body."""
        texts = {choice: self._echo(choice) for choice in self.answer.choices}
        while any(choice.reason is None for choice in texts):
            for choice in await self.answer.changed():
                texts[choice] += self._advance(choice)[0]
        choices = [self._choice(choice, text) for choice, text in texts.items()]
        return json.dumps({**self.frame, "choices": choices, "usage": self._usage()}).encode()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields server-sent events as tokens come; an error is the last of them."""
        head = b"data: " + json.dumps(self.frame)[:-1].encode() + b', "choices": ['
        tail = b'], "usage": null}\n\n' if self.asked.include_usage else b"]}\n\n"
        left = len(self.answer.choices)
        for choice in self.answer.choices:
            if self.asked.chat or self.asked.echo:
                first = self._delta(choice, self._echo(choice), (), (), begins=True)
                yield head + first + tail
        try:
            while left:
                for choice in await self.answer.changed():
                    piece, tokens, logprobs = self._advance(choice)
                    if piece or choice.reason is not None or (logprobs and tokens):
                        if self.asked.continuous_usage:
                            usage = json.dumps(self._usage()).encode()
                            tail = b'], "usage": ' + usage + b"}\n\n"
                        yield head + self._delta(choice, piece, tokens, logprobs) + tail
                    left -= choice.reason is not None
        except ApiError as error:
            yield b"data: " + error.content() + b"\n\n"
            return
        if self.asked.include_usage:
            last = {**self.frame, "choices": [], "usage": self._usage()}
            yield b"data: " + json.dumps(last).encode() + b"\n\n"
        yield END

    def _advance(self, choice: Choice) -> tuple[str, Sequence[int], Sequence[Any]]:
        come = choice.advance()
        if choice.reason is not None and choice.completion is None:
            self._stop([choice])
        return come

    def _echo(self, choice: Choice) -> str:
        return self.decode(list(choice.request.prompt)) if self.asked.echo else ""

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"index": choice.number}
        if self.asked.chat:
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = text
        said["logprobs"] = self._logprobs(choice, choice.tokens, choice.logprobs)
        return {**said, "finish_reason": choice.reason}

    def _delta(
        self, choice: Choice, piece: str, tokens: Sequence[int], logprobs: Sequence[Any],
        begins: bool = False,
    ) -> bytes:  # fmt: skip
        if not (logprobs or begins or choice.reason):  # nearly all: without making a dictionary
            text = json.dumps(piece)
            what = f'"delta": {{"content": {text}}}' if self.asked.chat else f'"text": {text}'
            end = ', "logprobs": null, "finish_reason": null}'
            return f'{{"index": {choice.number}, {what}{end}'.encode()
        said: dict[str, Any] = {"index": choice.number}
        if self.asked.chat:
            role = {"role": "assistant"} if begins else {}
            ends = choice.reason is not None and not piece
            said["delta"] = {} if ends else {**role, "content": piece}
        else:
            said["text"] = piece
        said["logprobs"] = self._logprobs(choice, tokens, logprobs)
        said["finish_reason"] = choice.reason
        return json.dumps(said).encode()

    def _logprobs(
        self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[Any]
    ) -> dict[str, Any] | None:
        if self.asked.logprobs is None or not logprobs:
            return None
        rows = [
            (self._named(token, one.token), [self._named(*other) for other in one.top])
            for token, one in zip(tokens, logprobs, strict=True)
        ]
        if self.asked.chat:
            return {"content": [{**own, "top_logprobs": top} for own, top in rows], "refusal": None}
        offsets = []
        for own, _ in rows:
            offsets.append(choice.offset)
            begin = sum(byte & 0xC0 != 0x80 for byte in own["bytes"] or ())
            choice.offset += begin  # characters
        tops = [{one["token"]: one["logprob"] for one in [*top, own]} for own, top in rows]
        return {
            "tokens": [own["token"] for own, _ in rows],
            "token_logprobs": [own["logprob"] for own, _ in rows],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, found = text_of(self.decode, token), self.token_bytes(token)
        if found is not None and found != text.encode():
            # a part of a character, as OpenAI writes it
            text = "".join(f"\\x{byte:02x}" for byte in found)
            text = text if self.asked.chat else f"bytes:{text}"
        given = None if found is None else list(found)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": given}

    def _usage(self) -> dict[str, Any]:
        choices = self.answer.choices
        first = [choice for choice in choices if choice.number % self.asked.n == 0]
        read, new = sum(c.prompt_tokens for c in first), sum(len(c.tokens) for c in choices)
        cached = sum(choice.cached_tokens for choice in first)
        return {
            "prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
