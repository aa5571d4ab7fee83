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
from typing import Any

import torch
from transformers import DynamicCache

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
    the others go on. The result's `cancel(index)` ends a request with the tokens it has.
    """
    batcher = Batcher(model, slots, lanes, piece, max_prompt_tokens)
    batcher.source = (r if isinstance(r, Request) else Request(r, **defaults) for r in requests)
    return batcher


class Batcher(Iterator[Completion]):
    """The engine under `generate_many`. A server calls `submit`, `cancel` and `step` itself;
    `submit` and `cancel` may be called from other threads."""

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
        self.model, self.piece, self.max_prompt_tokens = model, piece, max_prompt_tokens
        self.source: Iterator[Request] = iter(())
        self.slots: list[Running | None] = [None] * slots
        self.lanes: list[Running | None] = [None] * lanes
        self.reading = DynamicCache(config=model.config)  # of the lanes
        self.decoding = DynamicCache(config=model.config)  # of the slots
        self._submitted = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._cancelled: set[int] = set()
        self._mailbox = threading.RLock()  # over these three
        self._finished: deque[Completion] = deque()
        self.ahead = model.device.type == "cuda"  # elsewhere nothing runs beside this code
        self._choices: list[Choice] = []  # not looked at yet
        self._decoded: Choice | None = None  # the slots' last one, if it is among them

    def submit(self, request: Request) -> int:
        """Puts a request at the end of the queue; returns its index."""
        with self._mailbox:
            index, self._submitted = self._submitted, self._submitted + 1
            self._waiting.append((index, request))
        return index

    def cancel(self, index: int) -> None:
        """Ends a request at the next step. One that has ended is left alone."""
        with self._mailbox:
            self._cancelled.add(index)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(self.slots) or any(self.lanes)

    def __next__(self) -> Completion:
        while not self._finished:
            if not self.busy and not self._pull():
                raise StopIteration
            self._finished.extend(self.step())
        return self._finished.popleft()

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """One piece of the prompts being read, one token for the sequences being decoded; returns
        what has ended."""
        self._ended: list[Completion] = []
        with self._mailbox:
            self._end_cancelled()
            self._fill_lanes()
        wait = not self.ahead or any(
            s is not None and s.decides for s in (*self.slots, *self.lanes)
        )
        if wait:
            self._take(self._choices)
        earlier, self._choices = self._choices, []
        if self._worth_reading():
            self._read()
        self._fill_slots()
        if any(self.slots):
            self._decode()
        self._take(self._choices if wait else earlier)
        return self._ended

    def _pull(self) -> bool:
        request = next(self.source, None)
        if request is not None:
            self.submit(request)
        return request is not None

    def _end_cancelled(self) -> None:
        for running in (*self.slots, *self.lanes):
            if running is not None and running.index in self._cancelled:
                self._end(running, "cancelled")
        for index, _ in self._waiting:
            if index in self._cancelled:
                self._ended.append(Completion(index, [], "cancelled"))
        self._waiting = deque(e for e in self._waiting if e[0] not in self._cancelled)
        self._cancelled = {i for i in self._cancelled if i >= self._submitted}  # not read yet

    def _fill_lanes(self) -> None:
        for row in (row for row, running in enumerate(self.lanes) if running is None):
            while self.lanes[row] is None and (self._waiting or self._pull()):
                index, request = self._waiting.popleft()
                if index in self._cancelled:
                    self._ended.append(Completion(index, [], "cancelled"))
                    continue
                try:
                    self.lanes[row] = Running(index, request, self.model, self.max_prompt_tokens)
                except Exception as error:  # the request is wrong, which is no one else's business
                    self._ended.append(Completion(index, [], "error", error))

    def _worth_reading(self) -> bool:
        """A lane that has nothing to read costs as much as another: wait for company while some
        sequence stands ready for the next free slot."""
        reading = [s for s in self.lanes if s is not None and s.unread]
        ready = [s for s in self.lanes if s is not None and not s.unread]
        return bool(reading) and (not ready or 4 * len(reading) >= 3 * len(self.lanes))

    def _read(self) -> None:
        ids = torch.zeros(len(self.lanes), self.piece, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(ids)
        begin, last = [], {}
        for row, running in enumerate(self.lanes):
            if running is None or not running.unread:
                continue  # all padding: its state waits
            start = self.piece - running.next_size(self.piece)
            if running.unread == len(running.prompt):
                begin.append(row)
            ids[row, start:] = running.read(self.piece - start)
            mask[row, start:] = 1
            if not running.unread:
                last[row] = running
        self._empty_lanes(begin)
        logits = self.model(
            input_ids=self._send(ids), attention_mask=self._send(mask),
            past_key_values=self.reading, logits_to_keep=1,
        ).logits  # fmt: skip
        self._choose(last, logits)

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        """To the model, without waiting for what is under way there."""
        if self.model.device.type != "cuda":
            return values.to(self.model.device)
        return values.pin_memory().to(self.model.device, non_blocking=True)

    def _empty_lanes(self, rows: list[int]) -> None:
        """Zeros, and no reset, which some layers multiply with: NaN would stay."""
        groups = (g for layer in self.reading.layers for g in layer.states.values())
        old = [s[row] for group in groups for s in group for row in rows]
        if old:
            torch._foreach_zero_(old)

    def _fill_slots(self) -> None:
        """Moves the sequences whose prompts are read, as far as there are slots."""
        free = deque(row for row, running in enumerate(self.slots) if running is None)
        moves = []
        for lane, running in enumerate(self.lanes):
            if running is not None and running.tokens and free:
                slot = free.popleft()
                self.slots[slot], self.lanes[lane] = running, None
                moves.append((slot, lane))
        if not moves:
            return
        to, origin = [], []
        for ours, theirs in zip(self.decoding.layers, self.reading.layers, strict=True):
            if not ours.states:
                ours.update_states(0, **{n: self._empty(g) for n, g in theirs.states.items()})
            for name, group in theirs.states.items():
                for new, s in zip(ours.states[name], group, strict=True):
                    to += [new[slot] for slot, _ in moves]
                    origin += [s[lane] for _, lane in moves]
        torch._foreach_copy_(to, origin)

    def _empty(self, group: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(s.new_zeros(len(self.slots), *s.shape[1:]) for s in group)

    def _decode(self) -> None:
        logits = self.model(
            input_ids=self._next_tokens(), past_key_values=self.decoding, use_cache=True
        ).logits
        rows = {row: s for row, s in enumerate(self.slots) if s is not None}
        self._decoded = self._choose(rows, logits)

    def _next_tokens(self) -> torch.Tensor:  # [slots, 1]
        """What the slots hold as far as it was read, the likeliest of the last step where it was not."""
        unread = {} if self._decoded is None else self._decoded.rows
        known = [s is None or unread.get(row) is not s for row, s in enumerate(self.slots)]
        tokens = [s.tokens[-1] if s and k else 0 for s, k in zip(self.slots, known, strict=True)]
        if self._decoded is None:
            return self._send(torch.tensor(tokens, device="cpu")[:, None])
        best = self._decoded.best
        if any(k and s is not None for s, k in zip(self.slots, known, strict=True)):
            table = self._send(torch.tensor([tokens, known], device="cpu"))
            best = torch.where(table[1].bool(), table[0], best)
        return best[:, None]

    def _choose(self, rows: dict[int, Running], logits: torch.Tensor) -> Choice | None:
        """Asks for the next token of each of `rows`, given logits [rows, 1, V] of all."""
        if not rows:
            return None
        self._choices.append(Choice.between(rows, logits[:, -1]))
        return self._choices[-1]

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
                except Exception as error:  # whatever a request's own functions raise
                    self._end(running, "error", error)
                else:
                    if reason is not None:
                        self._end(running, reason)
            if choice is self._decoded:
                self._decoded = None

    def _end(self, running: Running, reason: str, error: Exception | None = None) -> None:
        running.ended = True
        for places in (self.slots, self.lanes):
            if running in places:
                places[places.index(running)] = None
        self._ended.append(Completion(running.index, running.tokens, reason, error))
