"""A recorded decoding step: its buffers, its graph or tape, and the cache whose states they
hold."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..state.cache import Change, RecurrentStateLayer, States, StaticRecurrentStateLayer
from ..utils.private_names import copy_all
from .op_tape import Tape, Unrecordable

Take = Callable[[torch.Tensor], torch.Tensor]  # must return an ordinary tensor of its own


def _groups(layers: Iterable[RecurrentStateLayer]) -> list[States]:
    return [group for layer in layers for group in layer.held[0].values()]


def describe_states(layers: Iterable[RecurrentStateLayer]) -> tuple[Any, ...]:
    """Returns the names, shapes, dtypes and devices of the states of all layers."""
    names = tuple(name for layer in layers for name in layer.held[0])
    return names, tuple((s.shape, s.dtype, s.device) for group in _groups(layers) for s in group)


def states_of(layers: Iterable[RecurrentStateLayer]) -> list[torch.Tensor]:
    """Returns the states of all layers, after ending their loans."""
    return [s for layer in layers for group in layer.states.values() for s in group]


class Refused(RuntimeError):
    """This step cannot be recorded; the message says why."""


class CaptureFailed(Refused):
    """An op of the step cannot be part of a CUDA graph."""


class Turns:
    """Serialises access to an engine's buffers: one thread at a time, and on a GPU one stream at a
    time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: Any = None  # the stream of the last turn
        self.streams = False  # whether there were turns in several streams

    def take(self, device: torch.device) -> None:
        """Makes the current stream wait for all work that other streams did with the buffers."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
            self.streams = True
        self.stream = stream

    def wait(self) -> None:
        """Waits until the GPU has finished all work on the buffers, so that they may be freed."""
        if self.stream is not None:
            self.stream.synchronize()


class BufferLoan:
    """Lends a recording's buffers to one cache as its states; implements cache.Loan.

    The loan ends when other code reads the states or when another cache is decoded."""

    def __init__(self, turns: Turns, device: torch.device, steps: dict[Any, "StepLayer"]):
        self.turns, self.device = turns, device
        self.steps = steps  # weak references to the cache's layers, and their buffers
        self.stream: Any = None  # the stream of the cache's last token

    def end(self, layer: Any, change: Change | None = None) -> bool:
        with self.turns.lock:
            states, loan = layer.held
            if loan is not self:
                return False
            with nullcontext() if change is not None else self._in_the_tokens_stream():
                self.turns.take(self.device)
                self._fold(layer)
                new = {n: tuple(map(change or torch.clone, group)) for n, group in states.items()}
            layer.held = new, None
        return True

    @contextmanager
    def _in_the_tokens_stream(self) -> Iterator[None]:
        """Makes copies in the stream of the cache's last token, as ordinary tensors.

        A reader in another stream must wait for that stream, as for a model that is not
        recorded."""
        stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with stream, torch.inference_mode(False), torch.no_grad():
            yield

    @contextmanager
    def borrow(self, layer: Any, rows: Sequence[int], overwritten: bool) -> Iterator[None]:
        with self.turns.lock:
            self.turns.take(self.device)
            self.stream = self.turns.stream
            replay = self.steps[weakref.ref(layer)].replay if layer.held[1] is self else None
            if replay is not None and overwritten:
                replay.empty(rows)
            elif replay is not None:
                for row in rows:
                    replay.fold(slice(row, row + 1))
            yield

    def take_back(self, layer: Any, tokens: int) -> bool:
        with self.turns.lock:
            held = all((one := ref()) is not None and one.held[1] is self for ref in self.steps)
            replay = self.steps[weakref.ref(layer)].replay
            if replay is None or not held or not all(s.has_ring_alone for s in self.steps.values()):
                return False
            self.turns.take(self.device)
            self.stream = self.turns.stream
            return replay.take_back(tokens)

    def _fold(self, layer: Any) -> None:
        if (replay := self.steps[weakref.ref(layer)].replay) is not None:
            replay.fold()


class StepLayer(StaticRecurrentStateLayer):
    """One layer's buffers inside a recording; `changed` lists states that a step did not write in
    place."""

    keeps_ring = True

    def __init__(self, layer: RecurrentStateLayer):
        super().__init__()
        self.states = {name: _buffers_like(group) for name, group in layer.held[0].items()}
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update_states(self, num_new_tokens: int, **states: States) -> None:
        for name, group in states.items():
            for buffer, s in zip(self.states[name], group, strict=True):
                if (s.dtype, s.shape) != (buffer.dtype, buffer.shape):
                    raise Refused(f"the {name} states change from {buffer.dtype} to {s.dtype}")
                if s is not buffer:
                    self.changed.append((buffer, s))

    @property
    def has_ring_alone(self) -> bool:
        """Whether the ring holds all that the last tokens changed."""
        return self.replay is not None and len(self.states) == 1

    def take_changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        changed, self.changed = self.changed, []
        return changed


class Recording:
    """A model's recorded step for one batch size: its input, its states, and its graph or tape."""

    def __init__(self, layers: Sequence[StepLayer], tokens: torch.Tensor):
        self.layers = list(layers)
        self.groups = _groups(self.layers)
        self.cache = Cache(layers=self.layers)
        self.tokens = torch.zeros_like(tokens)
        # weak references to the cache layers that last borrowed the buffers
        self.owners: list[Any] = []
        self.loan: BufferLoan | None = None
        self.graph: Any = None
        self.logits: Any = None
        self.replay: Any = None  # runs the step's ops where there are no graphs

    def fits(self, layers: list[RecurrentStateLayer]) -> bool:
        return self.holds(layers) or describe_states(layers) == describe_states(self.layers)

    def holds(self, layers: list[RecurrentStateLayer]) -> bool:
        loan = self.loan
        if loan is None or [owner() for owner in self.owners] != layers:
            return False
        return all(layer.held[1] is loan for layer in layers)

    def bind(self, layers: list[RecurrentStateLayer], turns: Turns) -> None:
        """Copies the states of `layers` into the buffers and lends them; the previous cache gets
        copies."""
        if len({id(layer) for layer in layers}) < len(layers):
            raise Refused("the cache has one layer several times")
        if self.loan is not None:
            for layer in (owner() for owner in self.owners):
                if layer is not None and layer.held[1] is self.loan:
                    self.loan.end(layer)
        old = states_of(layers)
        turns.take(self.tokens.device)  # after the copies above, which ran in other streams
        copy_all([s for group in self.groups for s in group], old)
        if turns.streams:  # another stream may own their memory
            for s in old:
                s.record_stream(turns.stream)
        for own in self.layers:
            if own.replay is not None:
                own.replay.ring.used.zero_()
        self.owners = [weakref.ref(layer) for layer in layers]
        steps = dict(zip(self.owners, self.layers, strict=True))
        self.loan = BufferLoan(turns, self.tokens.device, steps)
        for own, layer in zip(self.layers, layers, strict=True):
            layer.held = ({name: own.states[name] for name in layer.states}, self.loan)

    def compute(self, model: Any) -> torch.Tensor:
        return model.next_logits(self.tokens, self.cache)

    def forward(self, model: Any) -> torch.Tensor:
        logits = self.compute(model)
        changed = [pair for layer in self.layers for pair in layer.take_changed()]
        if changed:
            buffers, states = map(list, zip(*changed, strict=True))
            copy_all(buffers, states)
        return logits

    def record(self, model: nn.Module, pool: Any, stream: Any) -> None:
        """Captures the step as a CUDA graph. It must have run once, so that lazy work is done.

        The capture uses its own `stream`, so that cuBLAS's workspace for it is allocated inside the
        capture, from `pool`, which the graph keeps. A workspace from before belongs to torch, which
        may free it (torch.compile does before it records graphs): the graph would then write into
        memory of other tensors.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.tokens.device)
        random = torch.cuda.default_generators[self.tokens.device.index]
        try:
            # only this thread's calls must be legal in a capture: other threads may go on
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self.logits = self.forward(model)
        except BaseException:
            # After a failed capture torch is still in the capture's stream, and its generator draws
            # nothing outside a capture.
            torch.cuda.set_stream(current)
            random.graphsafe_set_state(random.clone_state())
            raise
        self.graph = graph

    def record_ops(self, model: nn.Module) -> None:
        """Records the step as a tape of ops, where there are no CUDA graphs."""
        try:
            self.replay = Tape().record(lambda: self.forward(model))
        except Unrecordable as error:
            raise Refused(f"the step cannot be put on a tape: {error}") from error

    def run(self, tokens: torch.Tensor, cache: Cache, take: Take) -> torch.Tensor:
        """Replays the step for `tokens`, and returns what `take` makes of the logits, which the next
        replay of a graph overwrites; `cache` is the one that has the buffers."""
        assert self.loan is not None
        self.loan.stream = self.loan.turns.stream
        self.tokens.copy_(tokens)
        logits = self.replay_ops()
        for layer in cache.layers:  # after the step, so that a failed one is not counted
            layer.length += 1
        return take(logits)

    def replay_ops(self) -> torch.Tensor:
        """Runs the recorded ops, and returns the logits, which the next replay of a graph
        overwrites."""
        if self.graph is None:
            with torch.inference_mode():  # saves autograd's checks in Python
                return self.replay()
        self.graph.replay()
        return self.logits


def _buffers_like(group: States) -> States:
    """Allocates zero states like `group`; equal shapes share one tensor, as fused-rnn returns
    them."""
    if len({(s.shape, s.dtype) for s in group}) == 1:
        return group[0].new_zeros((len(group), *group[0].shape)).unbind(0)
    return tuple(torch.zeros_like(s, memory_format=torch.contiguous_format) for s in group)
