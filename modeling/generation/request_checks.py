"""Checks of what a request of continuous batching holds, and of what its functions return."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


def first_unread(cache: Any, prompt: int) -> int:
    """Returns how many of the prompt's tokens the given state holds: 0 if there is none."""
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values is a {type(cache).__name__}, but must be None or a Cache")
    length = int(cache.get_seq_length())
    if not 0 < length < prompt:
        raise ValueError(
            f"past_key_values holds {length} tokens, but must hold at least one and fewer than the "
            f"{prompt} of the prompt, which has them too"
        )
    return length


def check_cuts(keep_at: Any, begin: int, prompt: int) -> tuple[int, ...]:
    """Returns the numbers of tokens after which the state is wanted, in order."""
    if not isinstance(keep_at, Sequence) or not all(is_count(cut) for cut in keep_at):
        raise TypeError(f"keep_at is {keep_at!r:.60}, but must be a sequence of integers from 1 on")
    for cut in keep_at:
        if cut > prompt:
            raise ValueError(f"keep_at has {cut}, but the prompt has {prompt} tokens")
    return tuple(sorted({cut for cut in keep_at if cut > begin}))


def check_scores(scores: Any, shape: torch.Size, device: torch.device) -> None:
    """Raises unless a request's processors returned valid scores, from which a token can be
    chosen."""
    had = "logits_processor returned"
    if not isinstance(scores, torch.Tensor):
        kind = type(scores).__name__
        raise TypeError(f"{had} a {kind}, but must return a tensor of scores {list(shape)}")
    had += " scores"
    if scores.shape != shape:
        raise ValueError(f"{had} {list(scores.shape)}, but must return {list(shape)}")
    if scores.device != device:
        raise ValueError(f"{had} on {scores.device}, but must return them on {device}")
    if not scores.is_floating_point():
        raise TypeError(f"{had} of {scores.dtype}, but must return a floating dtype")
    greatest = float(scores.max())  # NaN is the greatest
    if greatest != greatest:
        raise ValueError("logits_processor left a score of NaN")
    if greatest == -torch.inf:
        raise ValueError("logits_processor left no token with a finite score")


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def token_ids(name: str, value: Any) -> torch.Tensor:
    """Returns `value` as a new int64 tensor on the CPU; raises TypeError for anything but
    integers."""
    try:
        ids = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {value!r:.60}, but must be token ids: {error}") from None
    if ids.layout != torch.strided:
        raise TypeError(
            f"{name} is {value!r:.60}, but must be token ids: its layout is {ids.layout}"
        )
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise TypeError(f"{name} is {value!r:.60}, but must be token ids, which are integers")
    return ids.to(torch.long, copy=True)
