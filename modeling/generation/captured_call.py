"""A recorded call of several tokens, as assisted decoding makes them.

A call that tries a few tokens costs the model's Python as much as a prompt, and a GPU little more
than one token. So it is recorded like a step, once for each number of tokens. Its buffers are on loan
to no cache: a replay reads copies of the cache's states and gives the cache new tensors, because the
cache keeps those from before the call (state/rollback.py). All recordings of a batch size share their
buffers.
"""

from collections import OrderedDict
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..utils.private_names import copy_all
from .captured_step import Recording, StepLayer

SEEN = 3  # calls of so many tokens until they are recorded, which takes as long as three calls
KEPT_CALLS = 32  # recordings; the least recently used goes


class CallLayer(StepLayer):
    """One layer's buffers for recorded calls of several tokens."""

    keeps_ring = False
    record_past = True  # so that linear layers are fused as without a recording

    def keep_past(self) -> None:
        """Keeps nothing: the states from before the call are the cache's."""


class RecordedCall(Recording):
    """A model's recorded call for one shape [B, T] of tokens."""

    def read(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Returns the logits [B, T, V] of `tokens`, after which the cache has new states."""
        copy_all(self._states_of(self.layers), self._states_of(cache.layers))
        self.tokens.copy_(tokens)
        logits = self.replay_ops().clone()
        new = [torch.empty_like(s) for s in self._states_of(self.layers)]
        copy_all(new, self._states_of(self.layers))
        states = iter(new)
        for layer in cache.layers:
            groups = {n: tuple(next(states) for _ in group) for n, group in layer.states.items()}
            layer.update_states(tokens.shape[1], **groups)
        return logits

    @staticmethod
    def _states_of(layers: list[Any]) -> list[torch.Tensor]:
        return [s for layer in layers for group in layer.states.values() for s in group]


class RecordedCalls:
    """The recorded calls of a model, by the shape of their tokens."""

    def __init__(self) -> None:
        # A recording, how often such a call was seen, or None if it cannot be recorded.
        self._found: OrderedDict[Any, RecordedCall | int | None] = OrderedDict()

    def clear(self) -> None:
        self._found.clear()

    def find(self, tokens: torch.Tensor, cache: Cache) -> RecordedCall | None:
        """Returns the recording of a call, or counts one more call without."""
        key = _key(tokens)
        found = self._found.pop(key, 0)
        if isinstance(found, RecordedCall) and not found.fits(cache.layers):
            found = SEEN
        self._found[key] = found + 1 if isinstance(found, int) else found
        while len(self._found) > KEPT_CALLS:
            self._found.popitem(last=False)
        return found if isinstance(found, RecordedCall) else None

    def must_record(self, tokens: torch.Tensor) -> bool:
        """Whether so many calls were seen that the next one is to be recorded."""
        found = self._found.get(_key(tokens))
        return isinstance(found, int) and found >= SEEN

    def make(self, tokens: torch.Tensor, cache: Cache) -> RecordedCall:
        """Makes a recording that has recorded nothing yet."""
        for found in self._found.values():
            if isinstance(found, RecordedCall) and found.fits(cache.layers):
                return RecordedCall(found.layers, tokens)
        return RecordedCall([CallLayer(layer) for layer in cache.layers], tokens)

    def keep(self, tokens: torch.Tensor, recording: RecordedCall | None) -> None:
        """Keeps the recording of a call, or that there can be none."""
        self._found[_key(tokens)] = recording


def _key(tokens: torch.Tensor) -> tuple[Any, ...]:
    return *tokens.shape, tokens.device
