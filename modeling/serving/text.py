"""Text from tokens as they come, the stop strings that end it, and the bytes of single tokens."""

import re
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "�"  # what a decoder gives for bytes that are not a whole character
LONGEST = 16  # tokens that are kept because the text ends within a character
BYTES = 4  # of a character, at most; so a token that begins within one is among its first four
CONTEXT = 4  # tokens of the prompt before the text, which decide whether it begins with a space


class Text:
    """The text of a sequence's new tokens, given out in pieces that never change afterwards."""

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int], stops: Sequence[str]
    ):
        self._decode, self.stops = decode, stops
        self._ids = list(prompt[-CONTEXT:])  # the newest ones
        self._known = decode(self._ids).rstrip(UNFINISHED)  # as much of their text as was given out
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # whether a stop string was found: the text ends before it

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Returns the text that `tokens` add, and all that was held back if they are the `last`."""
        if self.stopped:
            return ""
        piece = self._held + self._decoded(tokens, last)
        found = [(at + len(stop), at) for stop in self.stops if (at := piece.find(stop)) >= 0]
        if found:  # the one that is complete first, however the text was cut into pieces
            self.stopped, self._held = True, ""
            return piece[: min(found)[1]]
        hold = 0 if last else self._hold(piece)
        self._held = piece[len(piece) - hold :]
        return piece[: len(piece) - hold]

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        self._ids += tokens
        text = self._decode(self._ids)
        whole = text if last else text.rstrip(UNFINISHED)
        given, many = len(self._known), len(self._ids)
        piece = whole[given:]
        self._known += piece
        if whole == text:
            self._keep(1)
        elif many > LONGEST:
            ends = range(many - 1, max(many - BYTES, 1), -1)
            end = next((n for n in ends if not self._decode(self._ids[:n]).endswith(UNFINISHED)), 0)
            if not end:  # these bytes are no character
                self._keep(1)
                return piece + text[max(len(whole), given) :]
            self._keep(many - end + 1)
            self._known = self._known.rstrip(UNFINISHED)
        return piece

    def _keep(self, tokens: int) -> None:
        """Keeps the newest tokens alone, and those before them as far as these begin within a
        character or have no text: they are the context of what comes."""
        for many in range(tokens, tokens + BYTES):
            kept = self._ids[-many:]
            self._known = self._decode(kept)
            if self._known and not self._known.startswith(UNFINISHED):
                break
        self._ids = kept

    def _hold(self, piece: str) -> int:
        """Returns how many characters at the end of `piece` may begin a stop string."""
        if not self.stops:
            return 0
        most = max(map(len, self.stops)) - 1
        for size in range(min(most, len(piece)), 0, -1):
            if any(stop.startswith(piece[-size:]) for stop in self.stops):
                return size
        return 0


def text_of(decode: Callable[[list[int]], str], token: int) -> str:
    """Returns what a token adds to a text. Some decoders drop the space before a text's first word."""
    alone, twice = decode([token]), decode([token, token])
    whole = UNFINISHED not in alone and twice.startswith(alone)
    return twice[len(alone) :] if whole else alone


class TokenBytes:
    """The bytes of a token, which may be a part of a character; None where the tokenizer does not say."""

    def __init__(self, tokenizer: Any, decode: Callable[[list[int]], str]):
        self._tokenizer, self._decode = tokenizer, decode

    def __call__(self, token: int) -> bytes | None:
        text = text_of(self._decode, token)
        if UNFINISHED not in text:
            return text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if found := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's
            return bytes.fromhex(found[1])
        if all(character in BYTE_LEVEL for character in name):
            return bytes(BYTE_LEVEL[character] for character in name)
        return None


def _byte_level() -> dict[str, int]:
    """Returns the byte of each character in the tokens of byte-level BPE (GPT-2's): printable Latin-1
    stands for itself, and the rest, in order, are the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_LEVEL = _byte_level()
