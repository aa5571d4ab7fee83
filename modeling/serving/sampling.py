"""Makes the Batcher's requests from what a client asked: one for each choice of each prompt."""

from typing import Any

import torch

from ..generation.requests import Request
from .protocol import Asked

GREEDY_BELOW = 1e-4  # of temperature: the scores divided by less would not be finite


class Bias:
    """Adds to the scores of some tokens, by their ids."""

    def __init__(self, biases: dict[int, float]):
        self.ids, self.amounts = list(biases), list(biases.values())

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        amounts = torch.tensor(self.amounts, dtype=scores.dtype, device=scores.device)
        return scores.index_add(
            1, torch.tensor(self.ids, device=scores.device), amounts[None].expand(len(scores), -1)
        )


class Penalties:
    """Lowers the scores of the tokens that the text has, behind its prompt.

    score - frequency * (how often it is there) - presence * (whether it is there)"""

    def __init__(self, prompt: int, frequency: float, presence: float):
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new).to(scores))
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores)


def make_request(asked: Asked, prompt: list[int], number: int, **more: Any) -> Request:
    """Returns the request of choice `number` of a prompt; its seed is the client's plus number."""
    processors: list[Any] = []
    if asked.logit_bias:
        processors.append(Bias(asked.logit_bias))
    if asked.presence_penalty or asked.frequency_penalty:
        processors.append(Penalties(len(prompt), asked.frequency_penalty, asked.presence_penalty))
    draws = asked.temperature >= GREEDY_BELOW
    return Request(
        prompt,
        asked.max_tokens,
        eos_token_id=[] if asked.ignore_eos else None,
        do_sample=draws,
        temperature=asked.temperature if draws and asked.temperature != 1 else None,
        top_k=asked.top_k if draws else None,
        top_p=asked.top_p if draws and asked.top_p != 1 else None,
        seed=None if asked.seed is None else asked.seed + number,
        logits_processor=processors or None,  # type: ignore[arg-type]
        logprobs=asked.logprobs,
        **more,
    )
