"""flash_xlstm: xLSTM[a:b] (arXiv 2405.04517), mLSTM and sLSTM blocks in one stack, on the tfla and
fused-rnn kernels.

mLSTM block: x + mixer(norm(x)).  sLSTM block: that, then x + mlp(norm(x)).  `slstm_at` says which is
where. `FlashXLSTMForCausalLM.from_xlstm` takes the weights of the `xlstm` package's xLSTMLMModel.
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init

from .configuration.configuration_flash_xlstm import FlashXLSTMConfig
from .convert_xlstm import convert_xlstm, describe_xlstm
from .layers.causal_conv import CausalConv1d
from .layers.feed_forward import make_norm
from .layers.headwise_linear import HeadwiseLinear
from .layers.mlstm import GateLinear, HeadNorm
from .layers.xlstm_mixers import GeGLU, SLSTMMixer, XLSTMMixer
from .recurrent_block import RecurrentBlock
from .recurrent_model import (
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
    RecurrentPreTrainedModel,
)
from .state.boundaries import Boundaries
from .state.cache import RecurrentStateLayer


class FlashXLSTMBlock(RecurrentBlock):
    """One block of flash_xlstm: an mLSTM, or an sLSTM with an MLP after it."""

    def __init__(self, config: FlashXLSTMConfig, layer_idx: int):
        super().__init__(layer_idx)
        width = config.hidden_size
        self.mixer_norm = make_norm("layer", width, config.norm_eps)
        self.mlp = None
        if config.is_slstm(layer_idx):
            self.mixer: nn.Module = SLSTMMixer(config, layer_idx)
            self.mlp_norm = make_norm("layer", width, config.norm_eps)
            self.mlp = GeGLU(config)
        else:
            self.mixer = XLSTMMixer(config)

    def run(
        self, hidden_states: torch.Tensor, cache: RecurrentStateLayer | None, boundaries: Boundaries
    ) -> torch.Tensor:  # [B, T, H]
        mixed = self.mixer(self.mixer_norm(hidden_states), cache, boundaries)
        hidden_states = hidden_states + mixed
        if self.mlp is None:
            return hidden_states
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class FlashXLSTMPreTrainedModel(RecurrentPreTrainedModel):
    """Base class of all flash_xlstm models, with the initialisation of weights."""

    config: FlashXLSTMConfig
    _no_split_modules: ClassVar = ["FlashXLSTMBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises weights as the `xlstm` package does: normal with deviation sqrt(2 / 5H)
        (Nguyen and Salazar 2019), smaller in residual projections. An mLSTM's gates start with zero
        weights and biases near 0 (input) and from 3 to 6 (forget); for an sLSTM see the mixers.
        """
        super()._init_weights(module)
        config = self.config
        if isinstance(module, GateLinear | HeadNorm | XLSTMMixer | SLSTMMixer):
            module.init_weights()
        elif isinstance(module, nn.Linear | nn.Embedding | HeadwiseLinear):
            std = math.sqrt(2 / (5 * config.hidden_size))
            init.normal_(module.weight, std=getattr(module, "std", std))
        elif isinstance(module, CausalConv1d):
            bound = 1 / math.sqrt(config.conv_kernel_size)
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)


class FlashXLSTMModel(RecurrentModel, FlashXLSTMPreTrainedModel):
    """The flash_xlstm base model: token ids or embeddings in, hidden states [B, T, H] out."""

    def __init__(self, config: FlashXLSTMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [FlashXLSTMBlock(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = make_norm("layer", config.hidden_size, config.norm_eps)
        self.post_init()


class FlashXLSTMForCausalLM(RecurrentForCausalLM, FlashXLSTMPreTrainedModel, GenerationMixin):
    """The flash_xlstm language model."""

    backbone_class = FlashXLSTMModel

    @classmethod
    def from_xlstm(cls, state_dict: dict[str, torch.Tensor], **changes: Any) -> Any:
        """Builds the model from the state dict of an xLSTMLMModel of the `xlstm` package.

        Its shapes and names tell the configuration, but for what has no weights: that is taken to be the
        package's default (GELU in the MLP), without dropout; `changes` go to FlashXLSTMConfig.
        Weights keep their dtype. Raises ValueError for a model that flash_xlstm does not have
        (biases in projections, no convolution, no norm at the end), naming the weights.
        """
        weights = convert_xlstm(state_dict)
        model = cls(FlashXLSTMConfig(**{**describe_xlstm(state_dict), **changes}))
        dtype = weights["model.embed_tokens.weight"].dtype
        missing, unexpected = model.to(dtype).load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise ValueError(
                f"state_dict has {', '.join(unexpected) or 'nothing'} too much, and "
                f"{', '.join(missing) or 'nothing'} is missing"
            )
        return model.eval()


class FlashXLSTMForSequenceClassification(
    RecurrentForSequenceClassification, FlashXLSTMPreTrainedModel
):
    """Classifies each sequence by the hidden state at its last token that is not padding."""

    backbone_class = FlashXLSTMModel


class FlashXLSTMForTokenClassification(RecurrentForTokenClassification, FlashXLSTMPreTrainedModel):
    """Classifies each token by the hidden state at it."""

    backbone_class = FlashXLSTMModel


__all__ = [
    "FlashXLSTMForCausalLM",
    "FlashXLSTMForSequenceClassification",
    "FlashXLSTMForTokenClassification",
    "FlashXLSTMModel",
    "FlashXLSTMPreTrainedModel",
]
