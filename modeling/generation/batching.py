"""Continuous batching for recurrent models: generates text for many prompts at once.

A sequence's state is a few rows that never grow, so a batch is a fixed number of slots. A finished
sequence leaves its slot at once and the next one's state is written there; meanwhile new prompts
are read, several at a time and chunk by chunk, in prefill rows beside the slots.

Requests do not influence each other. Calls of the model have few shapes: [slots, 1] for decoding,
[prefill_rows, prefill_chunk] for a chunk of a prompt, and on a GPU an eighth of that for a short one,
such as the new tokens of a conversation. A CPU, which takes as long as there are tokens, reads T
tokens of up to half a chunk in a call [1, T]. How a prompt is cut depends on its own length alone.
So a request runs the same kernels whatever the other rows hold, and no kernel mixes rows. The slot
of a request does not change its result by a bit, either: on a GPU every row runs the same
instructions; on the CPU this needs layer widths that are multiples of 64, and a multiple of four
`slots` per thread, because torch rounds differently at the ends of its vectors and for a thread
with a single row.

On a GPU the argmax token goes into the next step before the CPU has read it. So the end of a
request is known one step late, and the token computed for it meanwhile is dropped. While a request
that samples or processes its logits is running, every step waits for the CPU.

`model.generate` runs matrix products of other shapes, which sum in another order: its logits are
the same up to rounding, and so are its tokens unless two scores are equal up to rounding.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .argument_checks import is_count
from .request_queue import Intake
from .requests import Choice, Completion, Request, Running
from .slots import Batch


def generate_many(
    model: Any,
    requests: Iterable[Request | Sequence[int] | torch.Tensor],
    *,
    slots: int = 32,
    prefill_rows: int | None = None,
    prefill_chunk: int | None = None,
    max_prompt_tokens: int | None = None,
    **defaults: Any,
) -> "Batcher":
    """Runs all requests; iterating over the result gives a `Completion` for each as it ends.

        for done in flashcell.generate_many(model, prompts, max_new_tokens=100):
            print(done.index, done.reason, done.tokens)

    Args:
        model: a recurrent causal language model, in eval mode.
        requests: `Request`s, or prompts, which become requests with `defaults`. Read as needed: an
            endless generator is fine.
        slots: number of sequences decoded together; memory is proportional to it and does not grow.
        prefill_rows: number of prompts read together; None for 16 on CUDA and 8 elsewhere. More of
            them raise the throughput, and the sequences being decoded wait longer each time.
        prefill_chunk: tokens of each prompt read in one call; None for 256 on CUDA, where fewer
            would be bound by launches, and 64 elsewhere.
        max_prompt_tokens: longer prompts end with an error.

    A request that is invalid, or whose logits_processor or on_token raises, ends with `error` set,
    and the others go on. KeyboardInterrupt and SystemExit are raised to the caller too, at the end
    of the step. An exception of `requests` itself is raised after all requests read before it have
    ended. In both cases the next call goes on. The result's `cancel(index)` ends a request with the
    tokens so far.
    """
    Request((), **defaults)  # raises TypeError for an unknown name
    given = [requests] if isinstance(requests, str) else requests
    if isinstance(given, list | tuple):
        for text in (prompt for prompt in given if isinstance(prompt, str)):
            raise TypeError(
                f"requests has the text {text!r:.60}, but must have token ids: "
                "tokenizer(text)['input_ids']"
            )
    return Batcher(model, slots, prefill_rows, prefill_chunk, max_prompt_tokens).reading(
        requests, defaults
    )


class Batcher(Iterator[Completion]):
    """Runs requests by continuous batching: the engine under `generate_many`, for use in a server.

    Any thread may call `submit` and `cancel` at any time; `step` runs in one thread at a time."""

    def __init__(
        self, model: Any, slots: int = 32, prefill_rows: int | None = None, prefill_chunk: int | None = None,
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
        prefill_rows = prefill_rows if prefill_rows is not None else 16 if cuda else 8
        prefill_chunk = prefill_chunk if prefill_chunk is not None else 256 if cuda else 64
        for name, value, least in (
            ("slots", slots, 1),
            ("prefill_rows", prefill_rows, 1),
            ("prefill_chunk", prefill_chunk, 2),
        ):
            if not is_count(value, least):
                raise ValueError(f"{name} is {value!r}, but must be an integer of at least {least}")
        if max_prompt_tokens is not None and not is_count(max_prompt_tokens):
            had = f"max_prompt_tokens is {max_prompt_tokens!r}"
            raise ValueError(f"{had}, but must be None or an integer of at least 1")
        self.batch = Batch(model, slots, prefill_rows, prefill_chunk)
        self.ahead = cuda  # a CPU computes nothing beside this code
        self._intake = Intake(model, max_prompt_tokens)
        # by index; setting an entry, which is atomic in Python, is what ends a request
        self._ended: dict[int, tuple[Running, Completion]] = {}
        self._interrupt: BaseException | None = None  # raised at the end of the step
        self._whole = True  # False after a step that stopped halfway
        self._one = threading.Lock()  # held by the thread that steps

    def reading(self, source: Iterable[Any], defaults: dict[str, Any] | None = None) -> "Batcher":
        """Sets the source that requests are read from; `defaults` turn its bare prompts into
        Requests."""
        self._intake.source, self._intake.defaults = iter(source), defaults
        return self

    def submit(self, request: Request) -> int:
        """Puts a copy of a request at the end of the queue; returns its index."""
        return self._intake.submit(request)

    def cancel(self, index: int) -> None:
        """Ends a request at the next step. One that has ended is left alone."""
        self._intake.cancel(index)

    @property
    def busy(self) -> bool:
        return bool(self._intake.waiting or self._ended or self.batch.running)

    def __next__(self) -> Completion:
        with self._alone():
            while not self._ended:
                if not self.busy and not self._pull():
                    self._raise()
                    raise StopIteration
                self._step()
            return self._hand_out()

    def step(self) -> list[Completion]:
        """Reads one chunk of the prompts and decodes one token per sequence; returns what has
        ended."""
        with self._alone():
            self._step()
            return [self._hand_out() for _ in list(self._ended)]

    def _hand_out(self) -> Completion:
        index, (running, completion) = next(iter(self._ended.items()))
        self._leave(running)
        del self._ended[index]
        return completion

    def _alone(self) -> threading.Lock:
        """Returns the lock of a step, to be used by `with`; raises if a step is already running.

        Waiting for it instead would deadlock a callback, which runs inside a step."""
        if self._one.locked():
            raise RuntimeError(
                "a step of this Batcher is running: its callbacks, its source and other threads may "
                "call submit and cancel, but not step or next"
            )
        return self._one

    @torch.no_grad()
    def _step(self) -> None:
        if not self._whole:
            self._give_up()
        self._whole, batch = False, self.batch
        self._end_cancelled()
        self._fill_prefill_rows()
        wait = not self.ahead or any(running.decides for running in batch.running)
        if wait:
            self._take(batch.choices)
        earlier, batch.choices = batch.choices, []
        for running in batch.read() if batch.worth_reading() else ():
            self._give_state(running)
        batch.fill_slots()
        if any(batch.slots):
            batch.decode()
        self._take(batch.choices if wait else earlier)
        self._whole = True
        self._raise()

    def _raise(self) -> None:
        """Raises a callback's interrupt at once, and the source's own error once all requests have
        ended."""
        error, self._interrupt = self._interrupt, None
        if error is None and not self.busy:
            error, self._intake.source_error = self._intake.source_error, None
        if error is not None:
            raise error

    def _give_up(self) -> None:
        """Ends all running sequences after a broken-off step, whose effect on their states is
        unknown."""
        for running, _ in self._ended.values():
            self._leave(running)
        old = self.batch
        for running in old.running:
            error = RuntimeError(
                "the step was broken off, by an interrupt or the model's own error"
            )
            self._end(running, "error", error)
        self.batch = Batch(old.model, len(old.slots), len(old.prefill_rows), old.prefill_chunk)

    def _pull(self) -> bool:
        """Reads the source's next request, unless an interrupt waits to be raised."""
        if self._interrupt is not None:
            return False
        try:
            found = self._intake.read_source()
        except BaseException as error:
            found, self._interrupt = False, error
        self._end_cancelled()
        return found

    def _end_cancelled(self) -> None:
        for running in self._intake.cancelled(self.batch.running):
            self._end(running, "cancelled")

    def _fill_prefill_rows(self) -> None:
        prefill_rows = self.batch.prefill_rows
        for row in (row for row, running in enumerate(prefill_rows) if running is None):
            while prefill_rows[row] is None:
                running = self._intake.first()
                if running is not None:
                    self._start(running, row)
                elif not self._pull():
                    return

    def _start(self, running: Running, row: int) -> None:
        try:
            running.begin()
            self.batch.check_state(running)
        except BaseException as error:
            self._end_wrong(running, error)
        else:
            self.batch.prefill_rows[row] = running
            self._intake.waiting.popleft()

    def _take(self, choices: list[Choice]) -> None:
        """Waits for the tokens of `choices`, gives each request its own, and empties the list."""
        while choices:
            choice = choices.pop(0)
            table = choice.read()
            for row, running in choice.rows.items():
                if running.ended:
                    continue
                scores = choice.scores[row : row + 1] if running.decides else None
                try:
                    reason = running.take(table[row], scores)
                    if reason is not None:
                        self.batch.give_state(running)
                except BaseException as error:  # a request's own functions may raise anything
                    self._end_wrong(running, error)
                else:
                    if reason is not None:
                        self._end(running, reason)
            if choice is self.batch.decoded:
                self.batch.decoded = None

    def _give_state(self, running: Running) -> None:
        try:
            self.batch.give_state(running)
        except BaseException as error:  # as in _take
            self._end_wrong(running, error)

    def _end_wrong(self, running: Running, error: BaseException) -> None:
        self._end(running, "error", error)
        if not isinstance(error, Exception):
            self._interrupt = self._interrupt or error

    def _end(self, running: Running, reason: str, error: BaseException | None = None) -> None:
        told = running.tokens, reason, error, running.logprobs
        completion = Completion(running.index, *told)
        self._ended[running.index] = running, completion
        self._leave(running)

    def _leave(self, running: Running) -> None:
        running.ended = True
        self.batch.remove(running)
