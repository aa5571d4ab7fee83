"""Assisted decoding: transformers' loop tries several tokens in one call and takes back the wrong
ones.

The states that a cache goes back to are kept by rollback.py. The model reads a known text and
the tokens that are tried after it in two calls if the text is long, and keeps the states in between;
a short text (REREAD) is read again after each try, in the call that tries the next tokens: on a CPU
the number of calls matters more than that of tokens.
"""

from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationMixin

from ..utils.private_names import is_callers, mask_columns
from .cache import CACHE, is_recurrent
from .rollback import forgive_owed, owed_tokens, refuse_owed, takes_back

REREAD = 8  # tokens, as measured in NOTEBOOK.md
PROMPT_ONLY = ("attention_mask", "position_ids", "token_type_ids", "labels")


def tried_tokens(length: int, keep: Any, cache: Any, attention_mask: Any, position_ids: Any) -> int:
    """Returns how many of a call's last tokens are read by a call of their own, so that the states
    before them are kept; 0 for none.

    They are those whose logits are asked for. A text with padding or documents is not read again,
    because its mask and positions are not passed again."""
    if not takes_back(cache) or not isinstance(keep, int) or not 0 < keep < length:
        return 0
    once = attention_mask is not None or position_ids is not None
    return keep if once or length - keep > REREAD else 0


def held_of_text(input_ids: torch.Tensor, generation_config: Any, given: dict[str, Any]) -> int:
    """Returns how many tokens of `input_ids` the cache holds: none, if they are new tokens alone,
    for which the mask is longer."""
    mask: Any = given.get("attention_mask")
    columns = mask_columns(generation_config) if mask is None else mask.shape[1]
    held = int(given[CACHE].get_seq_length())
    if columns != input_ids.shape[1]:
        return 0
    if held >= input_ids.shape[1]:
        raise ValueError(
            f"the cache already holds {held} tokens, but input_ids has {input_ids.shape[1]}: pass the "
            "whole text, or the new tokens and an attention_mask over the whole text"
        )
    return held


class AssistedGeneration(GenerationMixin):
    """GenerationMixin with assisted decoding for recurrent states, as the model or its draft."""

    def _assisted_decoding(
        self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Runs the base class's loop; the cache that the caller gets has read all but the last
        token."""
        cache = kwargs.get(CACHE)
        records, layers = takes_back(cache), getattr(cache, "layers", ())
        for layer in filter(is_recurrent, layers):  # before 5.22, the loop does not say so
            layer.activate_past_recording()
            layer.seen_before = held_of_text(input_ids, generation_config, kwargs)
        known = kwargs.get("assistant_model") is None
        streamer = kwargs.get("streamer")
        promise = self._promise(logits_processor, stopping_criteria, cache, streamer)
        with promise if known else nullcontext():
            text = super()._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )
        if generation_config.return_dict_in_generate or is_callers(cache):
            ids = text.sequences if generation_config.return_dict_in_generate else text
            self._read_owed(cache, ids[:, :-1])
        if not records:
            for layer in filter(is_recurrent, layers):
                layer.stop_past_recording()
        return text

    def _read_tried(
        self: Any, input_ids: Any, cache: Any, others: dict[str, Any]
    ) -> tuple[Any, torch.Tensor | None]:
        """Reads tokens that are tried by recorded calls. Returns the tokens that are left to read,
        and the logits that are asked for, or None if some are left. `others` are the other arguments
        that forward was given."""
        if not takes_back(cache) or input_ids is None or input_ids.dim() != 2:
            return input_ids, None
        length, keep = input_ids.shape[1], others["logits_to_keep"]
        if tried := tried_tokens(length, keep, cache, None, None):
            text = input_ids[:, :-tried]
            if self.decoder.read(self, text, cache, others, has_logits=False) is None:
                return input_ids, None
            for layer in cache.layers:
                layer.keep_past()
            input_ids = input_ids[:, -tried:]
        logits = self.decoder.read(self, input_ids, cache, others)
        return input_ids, None if logits is None else logits[:, -keep:]

    def _add_owed(
        self: Any, input_ids: torch.LongTensor, next_sequence_length: int | None,
        is_first_iteration: bool | None, kwargs: dict[str, Any],
    ) -> int | None:  # fmt: skip
        """Returns `next_sequence_length` with the tokens that the cache must read again."""
        cache: Any = kwargs.get(CACHE)
        owed = owed_tokens(cache)
        if is_first_iteration and takes_back(cache) and (seen := cache.layers[0].seen_before):
            return input_ids.shape[1] - seen  # the base class's loop passes the whole text
        if not owed:
            return next_sequence_length
        if next_sequence_length is None or input_ids.shape[1] < next_sequence_length + owed:
            refuse_owed(cache)
        assert next_sequence_length is not None
        if kwargs.get("output_hidden_states") or self.config.output_hidden_states:
            self._read_owed(cache, input_ids[:, :-next_sequence_length])
            return next_sequence_length
        return next_sequence_length + forgive_owed(cache)

    @torch.no_grad()
    def _read_owed(self: Any, cache: Any, text: torch.LongTensor) -> None:
        """Reads the last tokens of `text` again, as many as the cache owes."""
        if owed_tokens(cache):
            owed = forgive_owed(cache)
            ids = text[:, -owed:].to(self.device).clone(memory_format=torch.contiguous_format)
            getattr(self, self.base_model_prefix)(input_ids=ids, past_key_values=cache)
            cache.crop(0)
