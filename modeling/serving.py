"""Many prompts at once: continuous batching for recurrent models.

A sequence's state is a few rows that never grow, so a batch is a fixed number of slots. A finished
sequence leaves its slot at once and the next one's state is written there; meanwhile new prompts
are read, several at a time and piece by piece, in lanes beside the slots.

What guarantees that requests do not disturb each other: every call of the model has one of two
shapes, [slots, 1] for decoding and [lanes, piece] for a piece of a prompt, and how a prompt is cut
depends on its own length alone. So the same kernels run for a request whatever stands beside
it, and none of them mixes rows: what the other rows hold never matters. Nor does it matter, to the
last bit, which slot a request gets: on a GPU every row runs the same instructions; on the CPU this
needs layer widths that are multiples of 64, and `slots` that the threads share in fours, because
torch rounds differently where its vectors end and where a thread is left with one row.

On a GPU the likeliest token goes into the next step before the CPU has read it: what a request's end
means for the batch is known a step late, and what was computed for it meanwhile is dropped. While a
request that samples or processes its logits is there, every step waits for it.

`model.generate` runs products of other shapes, whose sums are taken in another order: its logits
are the same to rounding, its tokens unless two are as likely to rounding.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .batch import Batch
from .intake import Intake
from .requests import Choice, Completion, Request, Running, is_count


def generate_many(
    model: Any,
    requests: Iterable[Request | Sequence[int] | torch.Tensor],
    *,
    slots: int = 32,
    lanes: int | None = None,
    piece: int | None = None,
    max_prompt_tokens: int | None = None,
    **defaults: Any,
) -> "Batcher":
    """Runs all requests; iterate over the result for a `Completion` of each, as they end.

        for done in flashcell.generate_many(model, prompts, max_new_tokens=100):
            print(done.index, done.reason, done.tokens)

    Args:
        model: a recurrent causal language model, in eval mode.
        requests: `Request`s, or prompts, which become requests with `defaults`. Read as needed: an
            endless generator is fine.
        slots: sequences that are decoded together; memory is theirs and does not grow.
        lanes: prompts that are read together; None for 16 on CUDA and 8 elsewhere. With more, all is
            done sooner, and the sequences that are decoded meanwhile wait longer each time.
        piece: tokens of each that are read in one call; None for 256 on CUDA, where fewer would wait for
            launches, and 64 elsewhere.
        max_prompt_tokens: longer prompts end with an error.

    A request that is wrong, or whose logits_processor or on_token raises, ends with `error` set, and
    the others go on. What is more than an Exception (KeyboardInterrupt, SystemExit) is raised to the
    caller too, at the end of the step. What `requests` raises comes after all that was read before.
    Either way the next call goes on. The result's `cancel(index)` ends a request with the tokens it has.
    """
    batcher = Batcher(model, slots, lanes, piece, max_prompt_tokens)
    as_request = lambda r: r if isinstance(r, Request) else Request(r, **defaults)
    batcher.source = map(as_request, requests)
    return batcher


class Batcher(Iterator[Completion]):
    """The engine under `generate_many`. A server calls `submit`, `cancel` and `step` itself;
    `submit` and `cancel` may be called from anywhere at any time, `step` by one at a time."""

    def __init__(
        self, model: Any, slots: int = 32, lanes: int | None = None, piece: int | None = None,
        max_prompt_tokens: int | None = None,
    ):  # fmt: skip
        config = getattr(model, "config", None)
        kinds = set(getattr(config, "layer_types", None) or ["attention"])
        if kinds != {"recurrent_state"}:
            raise TypeError(
                f"model has layers of {', '.join(sorted(kinds))}, but must be purely recurrent"
            )
        if model.training:
            raise ValueError("model is in training mode, but must be in eval mode")
        cuda = model.device.type == "cuda"
        lanes = lanes if lanes is not None else 16 if cuda else 8
        piece = piece if piece is not None else 256 if cuda else 64
        for name, value, least in (("slots", slots, 1), ("lanes", lanes, 1), ("piece", piece, 2)):
            if not is_count(value, least):
                raise ValueError(f"{name} is {value!r}, but must be an integer of at least {least}")
        if max_prompt_tokens is not None and not is_count(max_prompt_tokens):
            had = f"max_prompt_tokens is {max_prompt_tokens!r}"
            raise ValueError(f"{had}, but must be None or an integer of at least 1")
        self.batch = Batch(model, slots, lanes, piece)
        self.ahead = cuda  # elsewhere nothing runs beside this code
        self._intake = Intake(model, max_prompt_tokens)
        self._ended: deque[Completion] = deque()  # not handed out yet
        self._interrupt: BaseException | None = None  # raised at the end of the step
        self._whole = True  # no step was broken off halfway
        self._one = threading.Lock()  # held by who steps

    @property
    def source(self) -> Iterator[Request]:
        return self._intake.source

    @source.setter
    def source(self, requests: Iterator[Request]) -> None:
        self._intake.source = requests

    def submit(self, request: Request) -> int:
        """Puts a copy of a request at the end of the queue; returns its index."""
        return self._intake.submit(request)

    def cancel(self, index: int) -> None:
        """Ends a request at the next step. One that has ended is left alone."""
        self._intake.cancel(index)

    @property
    def busy(self) -> bool:
        return self._intake.busy or bool(self._ended) or bool(self.batch.running)

    def __next__(self) -> Completion:
        with self._alone():
            while not self._ended:
                if not self.busy and not self._pull():
                    self._raise()
                    raise StopIteration
                self._step()
            return self._ended.popleft()

    def step(self) -> list[Completion]:
        """One piece of the prompts being read, one token for the sequences being decoded; returns
        what has ended."""
        with self._alone():
            self._step()
            ended, self._ended = list(self._ended), deque()
            return ended

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waiting for the other call instead would be for ever where a callback is the one who waits."""
        if not self._one.acquire(blocking=False):
            raise RuntimeError(
                "a step of this Batcher is running: its callbacks, its source and other threads may "
                "call submit and cancel, but not step or next"
            )
        try:
            yield
        finally:
            self._one.release()

    @torch.no_grad()
    def _step(self) -> None:
        if not self._whole:
            self._give_up()
        self._whole, batch = False, self.batch
        self._collect()
        self._fill_lanes()
        wait = not self.ahead or any(running.decides for running in batch.running)
        if wait:
            self._take(batch.choices)
        earlier, batch.choices = batch.choices, []
        if batch.worth_reading():
            batch.read()
        batch.fill_slots()
        if any(batch.slots):
            batch.decode()
        self._take(batch.choices if wait else earlier)
        self._whole = True
        self._raise()

    def _raise(self) -> None:
        """What callbacks and source have left for the caller: an interrupt at once, the source's
        own error when all that was read before it has ended."""
        error, self._interrupt = self._interrupt, None
        if error is None and not self.busy:
            error, self._intake.source_error = self._intake.source_error, None
        if error is not None:
            raise error

    def _give_up(self) -> None:
        """Of sequences under way when a step was broken off, nobody knows which tokens their states have
        seen."""
        old = self.batch
        for running in old.running:
            error = RuntimeError(
                "the step was broken off, by an interrupt or the model's own error"
            )
            self._end(running, "error", error)
        self.batch = Batch(old.model, len(old.slots), len(old.lanes), old.piece)

    def _pull(self) -> bool:
        """Reads the source's next request, unless something waits to be raised."""
        if self._interrupt is not None:
            return False
        try:
            found = self._intake.read_source()
        except BaseException as error:
            found, self._interrupt = False, error
        self._collect()
        return found

    def _collect(self) -> None:
        wrong, cancelled = self._intake.collect(self.batch.running)
        self._ended.extend(wrong)
        for running in cancelled:
            self._end(running, "cancelled")

    def _fill_lanes(self) -> None:
        lanes = self.batch.lanes
        for row in (row for row, running in enumerate(lanes) if running is None):
            while lanes[row] is None and (self._intake.waiting or self._pull()):
                if not self._intake.waiting:
                    continue  # what was read is wrong, or cancelled
                running = self._intake.waiting.popleft()
                try:
                    running.begin()
                except Exception as error:
                    self._end(running, "error", error)
                else:
                    lanes[row] = running

    def _take(self, choices: list[Choice]) -> None:
        """Hands every request its token, as soon as it is here, and empties the list."""
        while choices:
            choice = choices.pop(0)
            table = choice.read()
            for row, running in choice.rows.items():
                if running.ended:
                    continue
                scores = choice.scores[row : row + 1] if running.decides else None
                try:
                    reason = running.take(table[row], scores)
                except BaseException as error:  # whatever a request's own functions raise
                    self._end(running, "error", error)
                    if not isinstance(error, Exception):
                        self._interrupt = self._interrupt or error
                else:
                    if reason is not None:
                        self._end(running, reason)
            if choice is self.batch.decoded:
                self.batch.decoded = None

    def _end(self, running: Running, reason: str, error: BaseException | None = None) -> None:
        running.ended = True
        self.batch.remove(running)
        self._ended.append(Completion(running.index, running.tokens, reason, error))
