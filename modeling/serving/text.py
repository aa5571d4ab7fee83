"""Text from tokens as they come, and the stop strings that end it."""

from collections.abc import Callable, Sequence

UNFINISHED = "�"  # what a decoder gives for bytes that are not a whole character
LONGEST = 16  # tokens that are held back because they end within a character
CONTEXT = 4  # tokens of the prompt before the text, which decide whether it begins with a space


class Text:
    """The text of a sequence's new tokens, given out in pieces that never change afterwards."""

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int], stops: Sequence[str]
    ):
        self._decode, self.stops = decode, stops
        self._ids = list(prompt[-CONTEXT:])  # from the newest token whose text is known to be whole
        self._known = decode(self._ids).rstrip(UNFINISHED)  # their text
        self._new = 0  # how many of them are not in it
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # whether a stop string was found: the text ends before it

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Returns the text that `tokens` add, and all that was held back if they are the `last`."""
        if self.stopped:
            return ""
        piece = self._held + self._decoded(tokens, last)
        end = min((at for at in map(piece.find, self.stops) if at >= 0), default=-1)
        if end >= 0:
            self.stopped, self._held = True, ""
            return piece[:end]
        hold = 0 if last else self._hold(piece)
        self._held = piece[len(piece) - hold :]
        return piece[: len(piece) - hold]

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        self._ids += tokens
        self._new += len(tokens)
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED) and not last and self._new < LONGEST:
            return ""
        piece = text[len(self._known) :]
        self._ids = self._ids[-max(self._new, 1) :]
        self._known, self._new = self._decode(self._ids), 0
        return piece

    def _hold(self, piece: str) -> int:
        """Returns how many characters at the end of `piece` may begin a stop string."""
        most = max(map(len, self.stops), default=1) - 1
        for size in range(min(most, len(piece)), 0, -1):
            if any(stop.startswith(piece[-size:]) for stop in self.stops):
                return size
        return 0
