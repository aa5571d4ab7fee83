"""Cache layers that hold recurrent states in transformers' DynamicCache and StaticCache.

Both build one layer per entry of `config.layer_types`; "recurrent_state" names ours. A layer keeps
any number of named groups of states, such as {"cell": (h, c), "conv": (window,)} or
{"cell": (C, n, m)}, whose shapes have nothing in common but the batch, which is their first
dimension. The empty state is zeros for all of them. They are kept in the dtype they come in (a
cell's fp32 whatever the model's dtype), and detached: a forward call that continues from a cache
begins a new graph, which is truncated backpropagation through time.

While a recorded step decodes a cache, its states lie in the recording's buffers, which the next
step overwrites (captured_step.py). The buffers are on loan: any other reader ends the loan and gets
copies that nothing overwrites.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..utils.private_names import copy_all, mark_static_address
from .replay import Replay
from .rollback import Rollback, States, refuse_owed

NAMES = "past_key_values", "cache"  # models call a cache so: before transformers 5.24, and since
CACHE = NAMES["cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}]
Change = Callable[[torch.Tensor], torch.Tensor]


class Loan(Protocol):
    """The protocol of a loan: a recorded step keeps a layer's states in its buffers."""

    def end(self, layer: Any, change: Change | None = None) -> bool:
        """Ends the loan: the layer gets copies of its states, or what `change` makes of them.

        Returns False if the loan had ended before. `change` must return new tensors."""

    def borrow(
        self, layer: Any, rows: Sequence[int], overwritten: bool
    ) -> AbstractContextManager[None]:
        """Locks the states for the block, whether the loan goes on or has ended; those of `rows` are
        whole in it, or will be `overwritten`."""

    def take_back(self, layer: Any, tokens: int) -> bool:
        """Takes back the layer's last tokens if the buffers can; returns whether."""


class RecurrentStateLayer(Rollback, CacheLayerMixin):
    """The states of one layer after the tokens seen so far, for DynamicCache.

    Each update replaces the tensors, so what a backward pass still needs is never overwritten.
    """

    is_compileable = True  # the shapes never change
    supports_early_init = False  # the mixer knows which states there are
    goes_on = True  # a second call continues from the states of the first

    def __init__(self, **kwargs: Any):
        super().__init__()
        # Both at once, so that no thread sees the one without the other. The loan is None while the
        # tensors are the layer's alone.
        self.held: tuple[dict[str, States], Loan | None] = ({}, None)
        self.length = 0

    @property
    def states(self) -> dict[str, States]:
        """Returns the states after ending a loan: the caller may keep or change them."""
        while True:
            states, loan = self.held
            if loan is None:
                return states
            loan.end(self)

    @states.setter
    def states(self, states: dict[str, States]) -> None:
        loan = self.held[1]
        if loan is not None:  # else the end of the loan would overwrite these states
            loan.end(self)
        self.held = (states, None)

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickles
        return {**vars(self), "held": (dict(self.states), None)}

    @contextmanager
    def borrow_states(
        self, rows: Sequence[int], overwritten: bool = False
    ) -> Iterator[dict[str, States]]:
        """Yields the states in place, without copies, for use of `rows` within the block only."""
        loan = self.held[1]
        if loan is None:
            yield self.held[0]
        else:
            with loan.borrow(self, rows, overwritten):
                yield self.held[0]

    def take_back(self, tokens: int) -> bool:
        loan = self.held[1]
        return loan is not None and loan.take_back(self, tokens)

    def get_states(self, name: str = "cell") -> States | None:
        """Returns the group of states to continue from, None at the start of a sequence."""
        return self.states.get(name)

    def update_states(self, num_new_tokens: int, **states: States) -> None:
        """Stores every group of the layer's states, after `num_new_tokens` more tokens."""
        if self.record_past and not self.past:
            self.keep_past()
        new = {name: tuple(s.detach() for s in group) for name, group in states.items()}
        self.states = {**self.states, **new}
        self.length += num_new_tokens
        self.is_initialized = True

    def reset(self) -> None:
        self.states, self.length, self.is_initialized = {}, 0, False
        self.past, self.owed = (), 0

    def map_states(self, change: Change) -> None:
        self.past = ()  # of other rows
        self.states = {name: tuple(change(s) for s in group) for name, group in self.states.items()}

    def _renew_states(self, change: Change) -> None:
        """Applies `change`, which must make new tensors, without first copying states that are on
        loan."""
        self.past, loan = (), self.held[1]
        if loan is None or not loan.end(self, change):
            self.map_states(change)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._renew_states(lambda s: s.index_select(0, beam_idx.to(s.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._renew_states(lambda s: s.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_states(lambda s: s[indices])

    @property
    def batch_size(self) -> int:
        return next((group[0].shape[0] for group in self.held[0].values()), -1)

    def get_seq_length(self) -> int | torch.Tensor:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int | torch.Tensor, int]:
        return self.get_seq_length() + query_length, 0

    def offload(self) -> None:
        """Does nothing: the states are a few rows per sequence, not worth offloading."""

    def prefetch(self) -> None:
        """Does nothing, as offload."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a recurrent layer has no keys and values: use update_states")

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a recurrent layer has no keys and values: use update_states")


class StaticRecurrentStateLayer(RecurrentStateLayer):
    """The states of one layer in fixed buffers, for StaticCache and compiled decoding.

    A step may write its states into the buffers that `get_states` gave it (never while gradients
    are recorded: then they are copies) and pass them back. The length is a tensor, because an int
    would be compiled in and every token would recompile.
    """

    in_dynamic_cache = False
    keeps_ring = False  # whether the last tokens may be kept beside the states, see replay.py
    replay: Replay | None = None

    def __init__(self, max_cache_len: int | None = None, **kwargs: Any):
        super().__init__()
        self.counter = torch.zeros((), dtype=torch.long)

    def get_states(self, name: str = "cell") -> States | None:
        group = self.states.get(name)
        if group is None or not torch.is_grad_enabled():
            return group
        return tuple(s.clone() for s in group)  # update_states overwrites the buffers

    def update_states(self, num_new_tokens: int, **states: States) -> None:
        for name, group in states.items():
            if name not in self.states:
                self._allocate(name, group)
            for buffer, s in zip(self.states[name], group, strict=True):
                if s is not buffer:
                    buffer.copy_(s.detach())
        self.counter.add_(num_new_tokens)

    def _allocate(self, name: str, group: States) -> None:
        self.states[name] = tuple(torch.zeros_like(s.detach()) for s in group)
        self.counter = self.counter.to(group[0].device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for buffer in (*self.states[name], self.counter):
                mark_static_address(buffer)

    def reset(self) -> None:
        for buffer in (*(s for group in self.states.values() for s in group), self.counter):
            buffer.zero_()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for group in self.states.values():
            for buffer in group:
                buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def get_seq_length(self) -> int | torch.Tensor:
        return self.counter if torch.compiler.is_compiling() else int(self.counter)


DYNAMIC_LAYER_TYPE_MAPPING["recurrent_state"] = RecurrentStateLayer
STATIC_LAYER_TYPE_MAPPING["recurrent_state"] = StaticRecurrentStateLayer


def own_states(cache: RecurrentStateLayer | None, name: str, empty: Callable[[], States]) -> States:
    """Returns states that may be overwritten: a static cache's buffers, else copies."""
    group = None if cache is None else cache.get_states(name)
    if group is None:
        return empty()
    if isinstance(cache, StaticRecurrentStateLayer):
        return group
    return tuple(s.clone(memory_format=torch.contiguous_format) for s in group)


def copy_rows(target: Any, origin: Any, moves: list[tuple[int, int]]) -> None:
    """Copies rows of one cache's states into another's, in place; `moves` are (target row, origin
    row)."""
    new, old = list[torch.Tensor](), list[torch.Tensor]()
    with ExitStack() as stack:
        for ours, theirs in zip(target.layers, origin.layers, strict=True):
            rows = [row for row, _ in moves]
            states = stack.enter_context(ours.borrow_states(rows, overwritten=True))
            for name, group in theirs.states.items():
                for s, other in zip(states[name], group, strict=True):
                    new += [s[row] for row, _ in moves]
                    old += [other[row] for _, row in moves]
        copy_all(new, old)


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer holds recurrent states.

    It checks no class: with several exported models in a process, each has a copy of the class."""
    return hasattr(layer, "update_states")


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """Returns the cache that was given under one of its two names, or None."""
    if past_key_values is not None and cache is not None:
        raise ValueError(
            "past_key_values and cache are both given, but are two names of one argument"
        )
    return cache if past_key_values is None else past_key_values


def check_cache(cache: Any, layers: int, batch: int) -> None:
    """Raises ValueError unless `cache` is recurrent, has `layers` layers, and is empty or of this
    batch."""
    own = getattr(cache, "layers", ())
    if len(own) != layers or not all(map(is_recurrent, own)):
        names = ", ".join(sorted({type(layer).__name__ for layer in own})) or "no kind"
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} with {len(own)} layers of {names}, but "
            f"must have {layers} with recurrent states, as DynamicCache(config=model.config) has"
        )
    held = cache.layers[0].batch_size
    if held not in (-1, batch):
        raise ValueError(
            f"past_key_values holds the states of {held} rows, but must hold {batch}, the batch's"
        )
    refuse_owed(cache)
