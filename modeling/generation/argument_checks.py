"""Checks what callers give: the arguments of `generate` before transformers derives others from them,
and a request of continuous batching with what its functions return."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from ..state.boundaries import check_prompt
from ..state.cache import NAMES, one_cache

# Ways of assisted decoding that need what a recurrent model does not have.
OTHER_DRAFTS = {
    "assistant_early_exit": "its cache is of all its layers",
    "use_mtp": "it has no heads for later tokens",
    "speculation_type": "it has no attention whose keys a draft could read",
}
SIGNATURE = inspect.signature(GenerationMixin.generate)


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises an error that names the argument, for a prompt of a wrong shape or a refused mode."""
    given = SIGNATURE.bind(model, *args, **kwargs).arguments
    rest = given.get("kwargs", {})
    cache = one_cache(*map(rest.get, NAMES))
    prompts = {
        "inputs_embeds": rest.get("inputs_embeds"),
        "inputs": given.get("inputs"),
        "input_ids": rest.get("input_ids"),
    }
    name, prompt = next(((n, p) for n, p in prompts.items() if p is not None), ("", None))
    if prompt is not None:  # else generate begins with bos_token_id
        name = "input_ids" if name == "inputs" else name
        check_prompt(name, prompt, rest.get("attention_mask"), cache)
    config = chosen_config(model, given, rest)
    mode = config.get_generation_mode(given.get("assistant_model"))
    if mode == GenerationMode.CONTRASTIVE_SEARCH:
        raise ValueError(
            f"contrastive search is asked for, but {type(model).__name__} cannot do it: it reads "
            "many tokens after one state"
        )
    if mode == GenerationMode.ASSISTED_GENERATION:
        for name, reason in OTHER_DRAFTS.items():
            if getattr(config, name, None):
                raise ValueError(
                    f"{name} is {getattr(config, name)!r}, but {type(model).__name__} cannot do it: "
                    f"{reason}: pass assistant_model or prompt_lookup_num_tokens"
                )


def chosen_config(model: Any, given: dict[str, Any], rest: dict[str, Any]) -> Any:
    """Returns the configuration that `generate` uses: keywords count before the generation_config
    that was given, and this before the model's own."""
    config = copy.copy(model.generation_config)
    for name, value in vars(given.get("generation_config") or config).items():
        if value is not None:
            setattr(config, name, value)
    for name in rest.keys() & vars(config).keys():
        setattr(config, name, rest[name])
    return config


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
