"""Says how a model would decode a token, and why not faster."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from .decode_path import Decision
from .fingerprint import Fingerprint


def explain(engine: Any, model: Any, batch: int) -> str:
    """Returns the whole decision of decode_path.py for one token per row, as lines of text.

    The call is one as `generate` makes it, with a cache and no other arguments. Nothing is run or
    recorded, so it does not say whether recording would fail."""
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    device = next(model.parameters()).device
    with torch.inference_mode():
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        x = torch.empty(batch, 1, model.config.hidden_size, dtype=model.dtype, device=device)
        token = engine.decide(
            model, tokens, _filled_cache(model, batch), {}, lambda: _refusal(model)
        )
        blocks = list(_blocks(model, x))
        blocks.append(("lm_head", model.decide_head(x)))
    last = "none yet" if engine.path is None else _line(Decision(engine.path, engine.reason))
    width = max(len(name) for name, _ in blocks)
    return "\n".join(
        [
            f"a token of batch {batch} on {device}: {_line(token)}",
            f"the last token: {last}",
            *(f"  {name:{width}}  {_line(decision)}" for name, decision in blocks),
        ]
    )


def _blocks(model: Any, x: torch.Tensor) -> Iterator[tuple[str, Decision]]:
    backbone = getattr(model, model.base_model_prefix)
    for i, block in enumerate(getattr(backbone, model._blocks)):
        decide, name = getattr(block, "decide_step", None), type(block).__name__
        none = Decision("modules", f"{name} has no fused step")
        yield f"{model._blocks}.{i}", none if decide is None else decide(x)


def _filled_cache(model: Any, batch: int) -> DynamicCache:
    """Returns a cache that looks as after a prompt."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.update_states(1, cell=(torch.empty(batch, 0, device="cpu"),))
    return cache


def _refusal(model: Any) -> str | None:
    return Fingerprint(model, next(model.parameters()).device).refusal


def _line(decision: Decision) -> str:
    return decision.path + (f", because {decision.reason}" if decision.reason else "")
