"""Where requests come in: from a source that is read as needed, and by `submit` from anywhere."""

import itertools
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

from .requests import Request, Running


class Intake:
    """The requests that wait for a prefill row, in their order.

    `submit` and `cancel` end with one append to a deque, which Python does in one piece. So threads,
    callbacks and signal handlers may call them at any time, whatever the batch is doing. An interrupt at
    any point loses nothing: what is taken from a place first stands in the next one.
    """

    def __init__(self, model: Any, max_prompt_tokens: int | None):
        self.model, self.max_prompt_tokens = model, max_prompt_tokens
        self.source: Iterator[Any] = iter(())
        self.defaults: dict[str, Any] | None = None  # of a source that yields prompts
        self.source_error: Exception | None = None  # for the caller, once all before it has ended
        # some have ended; of the source a request and its number come first
        self.waiting: deque[Running | tuple[Any, int]] = deque()
        self._numbers = itertools.count()
        self._newest = -1  # the highest number that has come here
        self._to_cancel: deque[int] = deque()
        self._cancelled: set[int] = set()

    def submit(self, request: Request) -> int:
        running = self._admit(request, next(self._numbers))
        if running.wrong is not None and not isinstance(running.wrong, Exception):
            raise running.wrong  # which has interrupted the caller, whose request was not taken
        self.waiting.append(running)
        return running.index

    def _admit(self, request: Any, index: int) -> Running:
        running = Running(index, self.model)
        try:
            if self.defaults is not None and not isinstance(request, Request):
                request = Request(request, **self.defaults)
            running.copy(request, self.max_prompt_tokens)
        except BaseException as error:  # the request is wrong, which is no one else's business
            running.wrong = error
        return running

    def _settled(self) -> list[Running]:
        """All that wait, with the source's requests copied."""
        for place, entry in enumerate(list(self.waiting)):
            if isinstance(entry, tuple):
                self.waiting[place] = self._admit(*entry)
        return [entry for entry in list(self.waiting) if isinstance(entry, Running)]

    def read_source(self) -> bool:
        """Takes the source's next request; False where there is none.

        An Exception of the source's own is kept in `source_error`, and until somebody takes it from there
        nothing more is read.
        """
        if self.source_error is not None:
            return False
        before = len(self.waiting)
        try:  # from the source to `waiting` in one piece
            self.waiting.extend(zip(itertools.islice(self.source, 1), self._numbers, strict=False))
        except Exception as error:
            self.source_error = error
        self._settled()
        return len(self.waiting) > before

    def first(self) -> Running | None:
        """Who gets the next prefill row. It stands here until it is taken from `waiting`."""
        while self.waiting:
            entry = self.waiting[0]
            running = self._settled()[0] if isinstance(entry, tuple) else entry
            self._newest = max(self._newest, running.index)
            if not running.ended:
                return running
            self.waiting.popleft()
        return None

    def cancel(self, index: int) -> None:
        self._to_cancel.append(operator.index(index))

    def cancelled(self, running: list[Running]) -> Iterator[Running]:
        """Those of `running` and `waiting` that are to be ended."""
        while self._to_cancel:
            self._cancelled.add(self._to_cancel[0])
            self._to_cancel.popleft()
        if not self._cancelled:
            return
        known = [*running, *self._settled()]
        yield from (r for r in known if r.index in self._cancelled and not r.ended)
        self._newest = max([self._newest, *(r.index for r in known)])
        self._cancelled = {i for i in self._cancelled if i > self._newest}  # not read yet
