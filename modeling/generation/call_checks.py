"""Checks a call of `generate` before transformers derives other arguments from its own."""

import copy
import inspect
from typing import Any

from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ..state.boundaries import check_prompt
from ..state.cache import NAMES, one_cache

ROLLED_BACK = {
    GenerationMode.ASSISTED_GENERATION: "assisted generation",
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive search",
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
    mode = chosen_mode(model, given, rest)
    if mode in ROLLED_BACK:
        raise ValueError(
            f"{ROLLED_BACK[mode]} is asked for, but {type(model).__name__} cannot do it: it tries "
            "tokens and takes them back, and a recurrent state is not taken back"
        )


def chosen_mode(model: Any, given: dict[str, Any], rest: dict[str, Any]) -> GenerationMode:
    """Returns the mode that `generate` takes: keywords count before the given configuration, and
    that before the model's own."""
    config = copy.copy(model.generation_config)
    for name, value in vars(given.get("generation_config") or config).items():
        if value is not None:
            setattr(config, name, value)
    for name in rest.keys() & vars(config).keys():
        setattr(config, name, rest[name])
    return config.get_generation_mode(given.get("assistant_model"))
