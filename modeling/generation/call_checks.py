"""Checks a call of `generate` before transformers derives other arguments from its own."""

import copy
import inspect
from typing import Any

from transformers import GenerationMixin
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
    """Returns the configuration that `generate` takes: keywords count before the one given, and
    that before the model's own."""
    config = copy.copy(model.generation_config)
    for name, value in vars(given.get("generation_config") or config).items():
        if value is not None:
            setattr(config, name, value)
    for name in rest.keys() & vars(config).keys():
        setattr(config, name, rest[name])
    return config
