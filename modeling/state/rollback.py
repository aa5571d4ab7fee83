"""Takes tokens back from a cache of recurrent states, as transformers' assisted decoding does.

A recurrent state cannot forget a token, so a layer keeps earlier states. After `crop` it holds the
last kept state that has seen none of the removed tokens, and owes the tokens in between: `owed` of
them were not removed and must be read again. The next call reads them together with its new tokens
(assisted.py), which is cheaper than a call of their own. Until then the cache counts them
in its length, and the model refuses the cache.
"""

from typing import Any

import torch

States = tuple[torch.Tensor, ...]  # each [B, ...]
KEPT = 2  # states; the second is the one before it, for a draft model that goes further back


class Rollback:
    """The part of a cache layer that takes tokens back, for layers whose tensors are replaced and
    never overwritten.

    record_past  whether earlier states are kept
    past         (number of tokens, states), the last ones kept; the empty state is always there
    owed         how many of the `length` tokens the states have not seen
    seen_before  how many tokens of the text the cache held when assisted decoding began
    """

    in_dynamic_cache = True  # whether DynamicCache makes layers of this class
    record_past = False
    past: tuple[tuple[int, dict[str, States]], ...] = ()
    owed = 0
    seen_before = 0
    states: dict[str, States]
    length: int
    is_initialized: bool

    def take_back(self, tokens: int) -> bool:
        """Takes back the last tokens if the states are kept so that it costs nothing; returns
        whether."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back, as transformers asks from 5.24 on."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Keeps earlier states from now on, so that `crop` can take tokens back."""
        if not self.in_dynamic_cache:
            raise RuntimeError(
                f"a {type(self).__name__} overwrites its states and cannot take tokens back: use a "
                "DynamicCache"
            )
        self.record_past = True

    def stop_past_recording(self) -> None:
        self.record_past, self.past, self.seen_before = False, (), 0

    def keep_past(self) -> None:
        """Keeps the present states for `crop`."""
        self.past = (*self.past[1 - KEPT :], (self.length, self.states))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, whose number is given negative, as Cache.crop says.

        crop(0) removes none, and the states before the last call need not be kept any longer."""
        tokens_to_remove = int(tokens_to_remove)  # older transformers give a tensor
        target = self.length + tokens_to_remove
        if tokens_to_remove == 0:
            self.past = self.past if self.owed else ()
            return
        inside = 0 <= target < self.length
        if inside and not self.owed and self.take_back(-tokens_to_remove):
            self.length = target
            return
        if not self.record_past:
            raise RuntimeError(
                f"tokens_to_remove is {tokens_to_remove}, but must be 0: a recurrent state cannot "
                "forget the tokens it has seen, and earlier states are not kept: call "
                "activate_past_recording before the tokens are read"
            )
        if not inside:
            raise RuntimeError(
                f"tokens_to_remove is {tokens_to_remove}, but must be from {-self.length} to 0: so "
                "many tokens has the cache"
            )
        seen = self.length - self.owed
        if target < seen:
            self.past = tuple(kept for kept in self.past if kept[0] <= target)
            seen, self.states = self.past[-1] if self.past else (0, {})
            self.is_initialized = bool(self.states)
        self.length, self.owed = target, target - seen

    def forgive(self) -> int:
        """Takes the owed tokens out of the length, because the next call reads them; returns how
        many."""
        owed, self.owed = self.owed, 0
        self.length -= owed
        return owed


def owed_tokens(cache: Any) -> int:
    """Returns how many tokens the cache must read again before it goes on."""
    layers: Any = getattr(cache, "layers", ())
    return getattr(layers[0], "owed", 0) if layers else 0


def forgive_owed(cache: Any) -> int:
    return max(layer.forgive() for layer in cache.layers)


def takes_back(cache: Any) -> bool:
    """Whether the cache keeps earlier states."""
    layers: Any = getattr(cache, "layers", ())
    return len(layers) > 0 and getattr(layers[0], "record_past", False)


def refuse_owed(cache: Any) -> None:
    """Raises ValueError if the states are behind the cache's length."""
    if owed := owed_tokens(cache):
        raise ValueError(
            f"past_key_values was cropped to {cache.get_seq_length()} tokens, but its states must "
            f"read the last {owed} of them again: pass the whole text to generate"
        )
