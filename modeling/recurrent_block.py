"""The base class of a model's blocks."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .state.boundaries import NO_BOUNDARIES, Boundaries
from .state.cache import RecurrentStateLayer


class RecurrentBlock(GradientCheckpointingLayer):
    """Base class of one block; each family implements `run`."""

    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return nn.Module.__call__(self, *args, **kwargs)  # without a gradient nothing runs twice

    # hidden_states is positional for checkpointing and for output_hidden_states
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        past_key_values: Cache | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        return self.run(hidden_states, cache, boundaries)

    def run(
        self, hidden_states: torch.Tensor, cache: RecurrentStateLayer | None, boundaries: Boundaries
    ) -> torch.Tensor:
        raise NotImplementedError
