"""The queue of requests, filled from a source that is read as needed and by `submit`."""

import itertools
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

from .requests import Request, Running


class Intake:
    """Holds the requests that wait for a prefill row, in order.

    `submit` and `cancel` end with one append to a deque, which is atomic in Python. So threads,
    callbacks and signal handlers may call them at any time, whatever the batch is doing. An
    interrupt loses no request: each is put into its new place before it is removed from the old
    one.
    """

    def __init__(self, model: Any, max_prompt_tokens: int | None):
        self.model, self.max_prompt_tokens = model, max_prompt_tokens
        self.source: Iterator[Any] = iter(())
        self.defaults: dict[str, Any] | None = None  # defaults for a source that yields prompts
        self.source_error: Exception | None = None  # raised once all requests before it have ended
        # holds ended ones too; a source's entry is (request, number) until it is copied
        self.waiting: deque[Running | tuple[Any, int]] = deque()
        self._numbers = itertools.count()
        self._newest = -1  # the highest request number so far
        self._to_cancel: deque[int] = deque()
        self._cancelled: set[int] = set()

    def submit(self, request: Request) -> int:
        running = self._admit(request, next(self._numbers))
        if running.wrong is not None and not isinstance(running.wrong, Exception):
            raise running.wrong  # an interrupt of the caller: the request is not queued
        self.waiting.append(running)
        return running.index

    def _admit(self, request: Any, index: int) -> Running:
        running = Running(index, self.model)
        try:
            if self.defaults is not None and not isinstance(request, Request):
                request = Request(request, **self.defaults)
            running.copy(request, self.max_prompt_tokens)
        except BaseException as error:  # an invalid request ends alone, with this error
            running.wrong = error
        return running

    def _settled(self) -> list[Running]:
        """Returns all waiting requests, after copying and checking those from the source."""
        for place, entry in enumerate(list(self.waiting)):
            if isinstance(entry, tuple):
                self.waiting[place] = self._admit(*entry)
        return [entry for entry in list(self.waiting) if isinstance(entry, Running)]

    def read_source(self) -> bool:
        """Takes the source's next request; returns False if there is none.

        An exception of the source is kept in `source_error`; nothing more is read until the caller
        takes it from there.
        """
        if self.source_error is not None:
            return False
        before = len(self.waiting)
        try:  # moves it from the source to `waiting` atomically
            self.waiting.extend(zip(itertools.islice(self.source, 1), self._numbers, strict=False))
        except Exception as error:
            self.source_error = error
        self._settled()
        return len(self.waiting) > before

    def first(self) -> Running | None:
        """Returns the request for the next prefill row; the caller removes it from `waiting`."""
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
        """Yields those of `running` and `waiting` that were cancelled."""
        while self._to_cancel:
            self._cancelled.add(self._to_cancel[0])
            self._to_cancel.popleft()
        if not self._cancelled:
            return
        known = [*running, *self._settled()]
        yield from (r for r in known if r.index in self._cancelled and not r.ended)
        self._newest = max([self._newest, *(r.index for r in known)])
        # Requests that have not been read yet are cancelled when they are.
        self._cancelled = {i for i in self._cancelled if i > self._newest}
