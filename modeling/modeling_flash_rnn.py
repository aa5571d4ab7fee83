"""flash_rnn: a Llama-style language model whose mixer is a recurrent cell.

Block: x + cell(norm(x)), then x + mlp(norm(x)); the cell has no output projection, and there are no
positions: order is what the state carries.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init

from .boundaries import Boundaries
from .cache import RecurrentStateLayer
from .configuration.configuration_flash_rnn import FlashRNNConfig
from .layers import RecurrentMixer
from .recurrent_model import (
    RecurrentBlock,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
    RecurrentPreTrainedModel,
    SwiGLU,
    make_norm,
)


class FlashRNNBlock(RecurrentBlock):
    def __init__(self, config: FlashRNNConfig, layer_idx: int):
        super().__init__(layer_idx)
        width = config.hidden_size
        self.mixer_norm = make_norm(config.norm, width, config.norm_eps)
        self.mixer = RecurrentMixer(config, layer_idx)
        self.mlp_norm = make_norm(config.norm, width, config.norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def run(
        self, hidden_states: torch.Tensor, cache: RecurrentStateLayer | None, boundaries: Boundaries
    ) -> torch.Tensor:  # [B, T, H]
        mixed = self.mixer(self.mixer_norm(hidden_states), cache, boundaries)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class FlashRNNPreTrainedModel(RecurrentPreTrainedModel):
    """The weights of every flash_rnn model at the start."""

    config: FlashRNNConfig
    _no_split_modules: ClassVar = ["FlashRNNBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Recurrent matrices are orthogonal in every head and gate (Saxe et al. 2014).

        A state is kept at the start: the LSTM's forget gate has bias 1 (Jozefowicz et al. 2015), so
        has the GRU's update gate; sLSTM's forget biases fall from 5 to -7 within a head by a power
        law whose exponent grows with depth (xLSTM, arXiv 2405.04517, in its published code).
        """
        super()._init_weights(module)
        if not isinstance(module, RecurrentMixer):
            return
        weight, bias, cell = module.recurrent_weight, module.gate_bias, self.config.cell
        if weight.device.type == "meta":
            return
        matrices = torch.empty_like(weight, dtype=torch.float32)
        for matrix in matrices.flatten(0, 1):
            nn.init.orthogonal_(matrix)
        biases = torch.zeros_like(bias)
        if cell in ("lstm", "gru"):
            biases[1] = 1.0
        elif cell == "slstm":
            depth = module.layer_idx / max(self.config.num_hidden_layers - 1, 1)
            unit = torch.linspace(0, 1, bias.shape[-1], device=bias.device)
            biases[1] = 5.0 - 12.0 * unit ** (0.3 + 1.3 * depth)
        init.copy_(weight, matrices)
        init.copy_(bias, biases)


class FlashRNNModel(RecurrentModel, FlashRNNPreTrainedModel):
    """The base model: token ids or embeddings in, hidden states [B, T, H] out."""

    def __init__(self, config: FlashRNNConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [FlashRNNBlock(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.post_init()


class FlashRNNForCausalLM(RecurrentForCausalLM, FlashRNNPreTrainedModel, GenerationMixin):
    """flash_rnn as a language model."""

    backbone_class = FlashRNNModel


class FlashRNNForSequenceClassification(
    RecurrentForSequenceClassification, FlashRNNPreTrainedModel
):
    """Classifies by the state after each row's last token that is not padding."""

    backbone_class = FlashRNNModel


class FlashRNNForTokenClassification(RecurrentForTokenClassification, FlashRNNPreTrainedModel):
    """Classifies every token by the state after it."""

    backbone_class = FlashRNNModel


__all__ = [
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNForTokenClassification",
    "FlashRNNModel",
    "FlashRNNPreTrainedModel",
]
