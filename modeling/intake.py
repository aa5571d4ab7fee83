"""Where requests come in: from a source that is read as needed, and by `submit` from anywhere."""

import itertools
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

from .requests import Completion, Request, Running


class Intake:
    """The requests that wait for a lane, in their order.

    `submit` and `cancel` do nothing but append to a deque, which Python does in one piece. So threads,
    callbacks and signal handlers may call them at any time, whatever the batch is doing.
    """

    def __init__(self, model: Any, max_prompt_tokens: int | None):
        self.model, self.max_prompt_tokens = model, max_prompt_tokens
        self.source: Iterator[Request] = iter(())
        self.source_error: Exception | None = None  # for the caller, once all before it has ended
        self.waiting: deque[Running] = deque()
        self._numbers = itertools.count()
        self._newest = -1  # number of the last request that came to `waiting`
        self._submitted: deque[Running | Completion] = deque()
        self._to_cancel: deque[int] = deque()
        self._cancelled: set[int] = set()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._submitted)

    def submit(self, request: Request) -> int:
        index = next(self._numbers)
        try:
            taken: Running | Completion = Running(
                index, request, self.model, self.max_prompt_tokens
            )
        except BaseException as error:  # the request is wrong, which is no one else's business
            self._submitted.append(Completion(index, [], "error", error))
            if not isinstance(error, Exception):
                raise
        else:
            self._submitted.append(taken)
        return index

    def cancel(self, index: int) -> None:
        self._to_cancel.append(operator.index(index))

    def collect(self, running: list[Running]) -> tuple[list[Completion], list[Running]]:
        """Moves what was submitted to `waiting`. Returns requests that are wrong, and those of `running`
        and `waiting` that are cancelled."""
        # a request's own cancel comes after it: read them first
        while self._to_cancel:
            self._cancelled.add(self._to_cancel.popleft())
        wrong = []
        while self._submitted:
            taken = self._submitted.popleft()
            self._newest = max(self._newest, taken.index)
            if isinstance(taken, Running):
                self.waiting.append(taken)
            else:
                wrong.append(taken)
        if not self._cancelled:
            return wrong, []
        cancelled = [r for r in (*running, *self.waiting) if r.index in self._cancelled]
        self.waiting = deque(r for r in self.waiting if r.index not in self._cancelled)
        self._cancelled = {i for i in self._cancelled if i > self._newest}  # not read yet
        return wrong, cancelled

    def read_source(self) -> bool:
        """Submits the source's next request; False where there is none.

        An Exception of the source's own is kept in `source_error`, and until somebody takes it from there
        nothing more is read.
        """
        if self.source_error is not None:
            return False
        try:
            request = next(self.source)
        except StopIteration:
            return False
        except Exception as error:
            self.source_error = error
            return False
        self.submit(request)
        return True
