"""Runs a Batcher in a thread of its own, beside the event loop that talks to the clients.

The loop puts requests and cancellations into a deque and wakes the thread; the thread gathers what
its steps have given, and hands it to the loop in one call. Neither waits for the other, but both
need Python's lock: so the thread gathers for a moment (`interval`), unless a sequence begins or ends,
and longer where the loop takes longer to write it all.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..generation.batching import Batcher
from ..generation.requests import Completion, Request
from .errors import ClientGone, of_server
from .text import Text

logger = logging.getLogger(__name__)
# The threads of a step and of the loop change places often: a step has hundreds of short ops.
SWITCH_SECONDS = 2e-4
PAUSE = 12  # times as long as the loop wrote, before it gets more: at most 1 / PAUSE of the time
LONGEST_PAUSE = 0.25  # seconds
FAILURES = 3  # steps that fail one after another, after which the server gives up


class Choice:
    """One sequence of an answer. The Batcher's thread makes it longer, the event loop reads it."""

    def __init__(self, number: int, request: Request, text: Text, live: bool):
        self.number, self.request, self.text, self.live = number, request, text, live
        self.prompt_tokens = len(request.prompt)
        state = request.past_key_values
        self.cached_tokens = 0 if state is None else int(state.get_seq_length())
        self.answer: Answer | None = None
        self.wants_logprobs = request.logprobs is not None
        # New tokens, or pairs with their Logprobs: in `came` until the Batcher's thread hands them
        # to the loop, then in `fresh`.
        self.came: list[Any] = []
        self.fresh: list[Any] = []
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.completion: Completion | None = None  # the Batcher's, when it has ended
        self.offset = 0  # characters of the tokens whose log-probabilities were written
        self.reason: str | None = None  # for the client: "stop" or "length"
        self.began = self.first = self.last = time.perf_counter()

    def advance(self) -> tuple[str, Sequence[int], Sequence[Any]]:
        """Takes the tokens that have come; returns the text that they add, themselves, and their
        Logprobs.

        Raises ApiError if the choice ended with an error."""
        fresh, self.fresh = self.fresh, []
        done = self.completion
        if done is not None and done.error is not None:
            raise of_server(f"the model failed: {done.error}")
        if done is not None and not self.live:
            pairs = zip(done.tokens, done.logprobs, strict=True)
            fresh = list(pairs) if self.wants_logprobs else done.tokens
        if self.reason is not None or not (fresh or done):
            return "", (), ()
        if fresh and not self.tokens:
            self.first = time.perf_counter()
        self.last = time.perf_counter()
        # One at a time where a stop string may come: what comes behind it is not counted.
        groups = [[one] for one in fresh] if self.text.stops else [fresh]
        piece, tokens, logprobs = "", list[int](), list[Any]()
        for group in groups or [[]]:
            new = [token for token, _ in group] if self.wants_logprobs else group
            last = done is not None and len(tokens) + len(new) == len(fresh)
            piece += self.text.add(new, last)
            tokens += new
            if self.wants_logprobs:
                logprobs += [logprob for _, logprob in group]
            if self.text.stopped:
                break
        self.tokens += tokens
        self.logprobs += logprobs
        if self.text.stopped:
            self.reason = "stop"
        elif done is not None:
            self.reason = "stop" if done.reason == "stop" else "length"
        return piece, tokens, logprobs


class Answer:
    """The choices of one request of a client, and a flag that wakes its writer."""

    def __init__(self, choices: list[Choice]):
        self.choices, self.ready, self.gone = choices, asyncio.Event(), False
        for choice in choices:
            choice.answer = self

    async def changed(self) -> list[Choice]:
        """Waits until tokens have come or a choice has ended; returns the choices that have."""
        await self.ready.wait()
        self.ready.clear()
        if self.gone:
            raise ClientGone
        # One that has met its stop string may get tokens until the Batcher lets go of it.
        return [c for c in self.choices if c.reason is None and (c.fresh or c.completion)]

    def leave(self) -> None:
        self.gone = True
        self.ready.set()


class Engine:
    """The Batcher's thread. All methods but `_run` and those that it calls belong to the loop."""

    def __init__(
        self, batcher: Batcher, most: int, interval: float = 0.0,
        stepped: Callable[[float], Any] | None = None,
    ):  # fmt: skip
        self.batcher, self.most, self.interval = batcher, most, interval
        self.unfinished: set[Choice] = set()  # of the loop: neither ended nor left by its client
        self.broken: str | None = None  # why the server cannot go on
        self.slots = len(batcher.batch.slots)
        self._stepped = stepped
        self._inbox: deque[tuple[Choice, bool]] = deque()  # with whether to cancel it
        self._wake, self._stopping = threading.Event(), False
        self._running: dict[int, Choice] = {}  # of the thread: by the Batcher's index
        self._indices: dict[Choice, int] = {}
        self._live: set[Choice] = set()  # running choices whose tokens are sent as they come
        self._unbegun: set[Choice] = set()  # those of _live that have no token yet
        self._ended: list[tuple[Choice, Completion]] = []
        self._sent = self._written = 0.0  # when the loop last got tokens, and how long it wrote
        self._writing = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    async def stop(self) -> None:
        """Waits until all that was submitted has ended."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    @property
    def free(self) -> int:
        """How many more choices may be submitted."""
        return self.most - len(self.unfinished)

    def submit(self, answer: Answer) -> None:
        for choice in answer.choices:
            self.unfinished.add(choice)
            self._inbox.append((choice, False))
        self._wake.set()

    def cancel(self, choices: Iterable[Choice]) -> None:
        """Ends choices that nobody waits for; those that have ended are left alone.

        Each counts as unfinished until the Batcher has let go of it."""
        for choice in choices:
            if choice in self.unfinished:
                self._inbox.append((choice, True))
        self._wake.set()

    def _deliver(
        self, came: list[tuple[Choice, list[Any]]], ended: list[tuple[Choice, Completion]]
    ) -> None:
        began = time.perf_counter()
        for choice, tokens in came:
            choice.fresh += tokens
        for choice, completion in ended:
            choice.completion = completion
            self.unfinished.discard(choice)
        for answer in {choice.answer for choice, _ in (*came, *ended)}:
            if answer is not None:
                answer.ready.set()
        self._loop.call_soon(self._has_written, began)  # behind the writers that this has woken

    def _has_written(self, began: float) -> None:
        self._written, self._writing = time.perf_counter() - began, False

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # nobody else would hear of it, and all would wait
            logger.exception("the thread of the Batcher failed")
            self.broken = f"{type(error).__name__}: {error}"
        if self.broken is not None:
            self._fail_all()

    def _work(self) -> None:
        failures = 0
        while failures < FAILURES:
            while self._inbox:
                self._accept(*self._inbox.popleft())
            if not self.batcher.busy:
                if self._stopping:
                    break
                self._wake.wait()
                self._wake.clear()
                continue
            began = time.perf_counter()
            try:
                ended, failures = self.batcher.step(), 0
            except Exception as error:  # the next step ends what ran, each with an error
                logger.exception("a step of the model failed")
                ended, failures, why = [], failures + 1, f"{type(error).__name__}: {error}"
            for completion in ended:
                self._end(completion)
            self._send()
            if self._stepped is not None:
                self._stepped(time.perf_counter() - began)
        if failures:
            self.broken = f"{FAILURES} steps of the model failed, the last with {why}"

    def _accept(self, choice: Choice, cancel: bool) -> None:
        if cancel:
            if choice in self._indices:
                self.batcher.cancel(self._indices[choice])
            return
        if choice.live:
            came = choice.came
            choice.request.on_token = (
                (lambda *pair: came.append(pair)) if choice.wants_logprobs else came.append
            )
            self._live.add(choice)
            self._unbegun.add(choice)
        index = self.batcher.submit(choice.request)
        self._running[index], self._indices[choice] = choice, index

    def _end(self, completion: Completion) -> None:
        choice = self._running.pop(completion.index)
        del self._indices[choice]
        self._ended.append((choice, completion))

    def _send(self) -> None:
        begun = {choice for choice in self._unbegun if choice.came}
        if not (begun or self._ended) and (
            self._writing or time.perf_counter() - self._sent < self._pause
        ):
            return
        self._unbegun -= begun
        came = [(choice, choice.came[:]) for choice in self._live if choice.came]
        for choice, _ in came:
            choice.came.clear()
        ended, self._ended = self._ended, []
        for choice, _ in ended:
            self._live.discard(choice)
            self._unbegun.discard(choice)
        if came or ended:
            self._sent, self._writing = time.perf_counter(), True
            self._loop.call_soon_threadsafe(self._deliver, came, ended)

    @property
    def _pause(self) -> float:
        return max(self.interval, min(PAUSE * self._written, LONGEST_PAUSE))

    def _fail_all(self) -> None:
        """Ends all that is there and all that comes, with an error, until the server stops."""
        while not self._stopping or self._inbox or self._running:
            while self._inbox:
                choice, cancel = self._inbox.popleft()
                if not cancel:
                    self._running[id(choice)] = choice
            for choice in self._running.values():
                error = RuntimeError(self.broken)
                self._ended.append((choice, Completion(0, [], "error", error)))
            self._running.clear()
            self._send()
            self._wake.wait()
            self._wake.clear()
