"""The batch of a Batcher: the running sequences, and the model calls for prefill and decoding."""

from collections import deque
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from ..state.cache import copy_rows
from ..state.rows import Shapes, check_row, state_shapes, take_row
from ..utils.private_names import zero_all
from .requests import Choice, Running

SHORTER = 8  # times; how much a GPU's call for short chunks is shorter
SHORTER_ALONE = 2  # on a CPU, where each of these is read in a call of its own length


class Batch:
    """Decoding slots and prefill rows, with a cache for each of the two. See batching.py."""

    def __init__(self, model: Any, slots: int, prefill_rows: int, prefill_chunk: int):
        self.model, self.prefill_chunk = model, prefill_chunk
        # A GPU takes about as long for one row as for all; a CPU takes as long as there are tokens.
        self.alone = model.device.type == "cpu"
        shorter = SHORTER_ALONE if self.alone else SHORTER
        # tokens; 0: there are no calls for short chunks
        self.short_chunk = prefill_chunk // shorter if prefill_chunk >= 2 * SHORTER else 0
        self._read_short = False  # whether the last call read short chunks
        self.slots: list[Running | None] = [None] * slots
        self.prefill_rows: list[Running | None] = [None] * prefill_rows
        self.reading = DynamicCache(config=model.config)  # the states of the prefill rows
        self.decoding = DynamicCache(config=model.config)  # the states of the slots
        self.choices: list[Choice] = []  # whose tokens have not been read yet
        self.decoded: Choice | None = None  # the slots' newest choice, if it has not been read
        self._shapes: Shapes | None = None  # of a row's states

    @property
    def running(self) -> list[Running]:
        return [running for running in (*self.slots, *self.prefill_rows) if running is not None]

    def remove(self, running: Running) -> None:
        for places in (self.slots, self.prefill_rows):
            if running in places:
                places[places.index(running)] = None

    def check_state(self, running: Running) -> None:
        """Raises unless the state that a request begins with is one of this model."""
        if running.begins_at:
            self._shapes = self._shapes or state_shapes(self.model)
            check_row("past_key_values", running.request.past_key_values, self._shapes)

    def give_state(self, running: Running) -> None:
        """Gives a request's `on_state` a copy of its state."""
        for cache, places in ((self.decoding, self.slots), (self.reading, self.prefill_rows)):
            if running in places:
                place = cache, places.index(running), running.position, self.model.config
                running.give_state(partial(take_row, *place))

    def worth_reading(self) -> bool:
        """Whether to run a prefill call now, or wait until more of its rows have a prompt to read.

        An idle row costs as much as a full one, so it waits while a sequence is ready for a free
        slot."""
        reading = [s for s in self.prefill_rows if s is not None and s.unread]
        ready = [s for s in self.prefill_rows if s is not None and not s.unread]
        return bool(reading) and (not ready or 4 * len(reading) >= 3 * len(self.prefill_rows))

    def read(self) -> list[Running]:
        """Reads a chunk of the prompts; returns the requests that have come to a cut."""
        chunk = self._next_chunk()
        if self.alone and chunk == self.short_chunk:
            wanted = [
                row
                for row, running in enumerate(self.prefill_rows)
                if running is not None and running.unread and self._chunk_of(running) == chunk
            ]
            return [running for row in wanted for running in self._read_alone(row)]
        ids = torch.zeros(len(self.prefill_rows), chunk, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(ids)
        begin, last, cut = list[int](), dict[int, Running](), list[Running]()
        for row, running in enumerate(self.prefill_rows):
            if running is None or not running.unread or self._chunk_of(running) != chunk:
                continue  # only padding: its state does not change
            size = running.next_size(self.prefill_chunk)
            start = chunk - size
            if running.position == running.begins_at:
                begin.append(row)
            ids[row, start:] = running.read(size)
            mask[row, start:] = 1
            if not running.unread:
                last[row] = running
            if running.position in running.cuts:
                cut.append(running)
        self._begin_prefill_rows(begin)
        logits = self.model(
            input_ids=self._send(ids), attention_mask=self._send(mask),
            past_key_values=self.reading, logits_to_keep=1,
        ).logits  # fmt: skip
        self._choose(last, logits)
        return cut

    def _read_alone(self, row: int) -> list[Running]:
        """Reads a chunk of one prompt; returns its request if it has come to a cut."""
        running, config = self.prefill_rows[row], self.model.config
        assert running is not None
        if running.position == running.begins_at:
            self._begin_prefill_rows([row])
        first = self.reading.batch_size == -1
        state = (
            DynamicCache(config=config)
            if first
            else take_row(self.reading, row, running.position, config)
        )
        ids = running.read(running.next_size(self.prefill_chunk))[None]  # [1, T]
        logits = self.model(
            input_ids=self._send(ids), past_key_values=state, use_cache=True, logits_to_keep=1
        ).logits
        if first:
            self._allocate(self.reading, state, len(self.prefill_rows))
        copy_rows(self.reading, state, [(row, 0)])
        self._choose({} if running.unread else {0: running}, logits)
        return [running] if running.position in running.cuts else []

    def _next_chunk(self) -> int:
        """Returns the size of the next call: of short chunks first, and in turns while there are
        both."""
        wanted = {self._chunk_of(s) for s in self.prefill_rows if s is not None and s.unread}
        self._read_short = min(wanted) == self.short_chunk and not (
            self._read_short and len(wanted) > 1
        )
        return self.short_chunk if self._read_short else self.prefill_chunk

    def _chunk_of(self, running: Running) -> int:
        """Returns the size of the call that reads a request's next chunk.

        It depends on the request alone, and not on its neighbours."""
        size = running.next_size(self.prefill_chunk)
        return self.short_chunk if size <= self.short_chunk else self.prefill_chunk

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        """Copies `values` to the model's device without waiting for work that runs there."""
        if self.model.device.type != "cuda":
            return values.to(self.model.device)
        return values.pin_memory().to(self.model.device, non_blocking=True)

    def _begin_prefill_rows(self, rows: list[int]) -> None:
        """Gives `rows` the states that their requests begin with: zeros, or the given ones.

        A reset argument would not do: some layers multiply, and NaN stays."""
        groups = (g for layer in self.reading.layers for g in layer.states.values())
        old = [s[row] for group in groups for s in group for row in rows]
        if old:
            zero_all(old)
        for row in rows:
            running = self.prefill_rows[row]
            if running is not None and running.begins_at:
                state = running.request.past_key_values
                if self.reading.batch_size == -1:
                    self._allocate(self.reading, state, len(self.prefill_rows))
                copy_rows(self.reading, state, [(row, 0)])

    def _allocate(self, cache: Any, like: Any, rows: int) -> None:
        """Gives an empty cache states of zeros, as wide as those of another one."""
        for ours, theirs in zip(cache.layers, like.layers, strict=True):
            groups = {
                name: tuple(s.new_zeros(rows, *s.shape[1:], device=self.model.device) for s in g)
                for name, g in theirs.states.items()
            }
            ours.update_states(0, **groups)

    def fill_slots(self) -> None:
        """Moves sequences whose prompts are read into free slots."""
        free = deque(row for row, running in enumerate(self.slots) if running is None)
        moves = []
        for row, running in enumerate(self.prefill_rows):
            if running is not None and running.tokens and free:
                slot = free.popleft()
                self.slots[slot], self.prefill_rows[row] = running, None
                moves.append((slot, row))
        if not moves:
            return
        if self.decoding.batch_size == -1:
            self._allocate(self.decoding, self.reading, len(self.slots))
        copy_rows(self.decoding, self.reading, moves)

    def decode(self) -> None:
        logits = self.model(
            input_ids=self._next_tokens(), past_key_values=self.decoding, use_cache=True
        ).logits
        rows = {row: s for row, s in enumerate(self.slots) if s is not None}
        for running in rows.values():
            running.position += 1
        self.decoded = self._choose(rows, logits)

    def _next_tokens(self) -> torch.Tensor:  # [slots, 1]
        """Returns the slots' next input tokens: host tokens where read, else the device's
        argmax."""
        unread = {} if self.decoded is None else self.decoded.rows
        known = [s is None or unread.get(row) is not s for row, s in enumerate(self.slots)]
        tokens = [s.tokens[-1] if s and k else 0 for s, k in zip(self.slots, known, strict=True)]
        if self.decoded is None:
            return self._send(torch.tensor(tokens, device="cpu")[:, None])
        best = self.decoded.best
        if any(k and s is not None for s, k in zip(self.slots, known, strict=True)):
            table = self._send(torch.tensor([tokens, known], device="cpu"))
            best = torch.where(table[1].bool(), table[0], best)
        return best[:, None]

    def _choose(self, rows: dict[int, Running], logits: torch.Tensor) -> Choice | None:
        """Starts choosing the next token of each of `rows` from the logits [B, 1, V] of all
        rows."""
        if not rows:
            return None
        self.choices.append(Choice.between(rows, logits[:, -1]))
        return self.choices[-1]
