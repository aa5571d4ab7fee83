"""A recorded call of several tokens, as assisted decoding makes them.

A call that tries a few tokens costs the model's Python as much as a prompt, and a GPU little more
than one token. So it is recorded like a step, once for each number of tokens. Its buffers are on loan
to no cache: a replay reads copies of the cache's states and gives the cache new tensors, because the
cache keeps those from before the call (state/rollback.py). Recordings of the same batch share their
buffers.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..utils.private_names import copy_all
from .captured_step import Recording, StepLayer, Turns, describe_states, states_of

SEEN = 3  # calls of a kind until it is recorded, which takes as long as three calls
KEPT_CALLS = 32  # recordings; the least recently used goes


class CallLayer(StepLayer):
    """One layer's buffers for recorded calls of several tokens."""

    keeps_ring = False
    record_past = True  # so that linear layers are fused as without a recording

    def keep_past(self) -> None:
        """Keeps nothing: the states from before the call are the cache's."""


class RecordedCall(Recording):
    """A model's recorded call for one shape [B, T] of tokens, with logits or without."""

    def __init__(self, layers: list[CallLayer], tokens: torch.Tensor, has_logits: bool):
        super().__init__(layers, tokens)
        self.has_logits = has_logits

    def compute(self, model: Any) -> torch.Tensor:
        if self.has_logits:
            return super().compute(model)
        backbone = getattr(model, model.base_model_prefix)
        return backbone(input_ids=self.tokens, past_key_values=self.cache).last_hidden_state

    def read(self, tokens: torch.Tensor, cache: Cache, turns: Turns) -> torch.Tensor:
        """Returns the logits [B, T, V] of `tokens`, or the hidden states [B, T, H] of a call without
        logits. The cache then has new states."""
        old = states_of(cache.layers)
        turns.take(tokens.device)  # after copies of states on loan, which ran in other streams
        if turns.streams:  # another stream may own their memory
            for s in old:
                s.record_stream(turns.stream)
        buffers = states_of(self.layers)
        copy_all(buffers, old)
        self.tokens.copy_(tokens)
        result = self.replay_ops().clone()
        new = [torch.empty_like(s) for s in buffers]
        copy_all(new, buffers)
        states = iter(new)
        for layer in cache.layers:
            groups = {n: tuple(next(states) for _ in group) for n, group in layer.states.items()}
            layer.update_states(tokens.shape[1], **groups)
        return result


class RecordedCalls:
    """The recorded calls of a model, by their kind: the tokens' shape, the states and the result."""

    def __init__(self) -> None:
        # A recording, how often such a call was seen, or None if it cannot be recorded.
        self._found: OrderedDict[Any, RecordedCall | int | None] = OrderedDict()

    def clear(self) -> None:
        self._found.clear()

    def find(
        self, tokens: torch.Tensor, cache: Cache, has_logits: bool,
        record: Callable[[Callable[[], RecordedCall]], RecordedCall | None],
    ) -> RecordedCall | None:  # fmt: skip
        """Returns the recording of a call, or None: call the model. `record` is called with what makes
        a recording when SEEN calls were seen."""
        states = describe_states(cache.layers)
        key = (*tokens.shape, tokens.device, has_logits, states)
        found = self._found.pop(key, 0)
        found = found + 1 if isinstance(found, int) else found
        if isinstance(found, int) and found >= SEEN:
            layers = self._layers_of(tokens, states)
            new = lambda: layers or [CallLayer(layer) for layer in cache.layers]
            found = record(lambda: RecordedCall(new(), tokens, has_logits))
        self._found[key] = found
        while len(self._found) > KEPT_CALLS:
            self._found.popitem(last=False)
        return found if isinstance(found, RecordedCall) else None

    def _layers_of(self, tokens: torch.Tensor, states: Any) -> list[Any]:
        """Returns the buffers of a recording with the same states, or none."""
        for (*_, device, _, others), found in self._found.items():
            if isinstance(found, RecordedCall) and (device, others) == (tokens.device, states):
                return found.layers
        return []
