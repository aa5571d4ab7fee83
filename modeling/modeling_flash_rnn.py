"""flash_rnn: a Llama-style language model whose mixer is a recurrent cell.

Block: x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is a cell with an input projection
(recurrent_mixer.py), or what was published around a diagonal cell (diagonal_mixer.py). There are no
positions: order is what the state carries.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init

from .configuration.configuration_flash_rnn import FlashRNNConfig
from .generation.decode_path import Decision, decide_block_step
from .layers.decode_linear import (
    FusedStep,
    StepLinear,
    StepParts,
    operands,
    step_swiglu,
    taken_along,
)
from .layers.diagonal_mixer import DiagonalMixer
from .layers.diagonal_rnn import FlashGRU, FlashLSTM
from .layers.feed_forward import SwiGLU, make_norm
from .layers.headwise_linear import HeadwiseLinear
from .layers.recurrent_mixer import RecurrentMixer
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


class FlashRNNBlock(FusedStep, RecurrentBlock):
    def __init__(self, config: FlashRNNConfig, layer_idx: int):
        super().__init__(layer_idx)
        width = config.hidden_size
        self.mixer_norm = make_norm(config.norm, width, config.norm_eps)
        self.mixer: DiagonalMixer | RecurrentMixer
        diagonal = config.is_diagonal
        self.mixer = DiagonalMixer(config) if diagonal else RecurrentMixer(config, layer_idx)
        self.mlp_norm = make_norm(config.norm, width, config.norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)
        if config.is_diagonal:
            back: Any
            for back in (self.mixer.out_proj, self.mlp.down_proj):
                # up to here, of two residual branches each: _init_weights
                back.blocks = layer_idx + 1

    def run(
        self, hidden_states: torch.Tensor, cache: RecurrentStateLayer | None, boundaries: Boundaries
    ) -> torch.Tensor:  # [B, T, H]
        fused = self.run_fused(hidden_states, cache, boundaries)
        if fused is not None:
            return fused
        mixed = self.mixer(self.mixer_norm(hidden_states), cache, boundaries)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))

    @property
    def step_parts(self) -> StepParts | str:
        mixer, mlp = self.mixer, self.mlp
        if type(mixer) not in (DiagonalMixer, RecurrentMixer) or type(mlp) is not SwiGLU:
            return "the mixer or the MLP is another class"
        linears = [*mixer.linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = [*taken_along(self.mixer_norm), *taken_along(self.mlp_norm)]
        return StepParts([*linears, *norms], (mixer, mlp), mixer.config.backend)

    def decide_step(self, x: torch.Tensor) -> Decision:
        linears = super().decide_step(x)
        return linears if linears.kernel is None else self.decide_block_step(x, None)

    def decide_block_step(self, x: torch.Tensor, cache: RecurrentStateLayer | None) -> Decision:
        mixer: Any = self.mixer
        if type(mixer) is not RecurrentMixer:
            return Decision(
                "linear_step", "the cell is diagonal, and block_step takes others alone"
            )
        norms, wide = (self.mixer_norm, self.mlp_norm), lambda: mixer.has_wide_states(x, cache)
        return decide_block_step(x, mixer.config.backend, mixer, norms, wide)

    def step(
        self,
        step_linear: StepLinear,
        x: torch.Tensor,
        cache: RecurrentStateLayer | None,
        T: int = 1,
    ) -> torch.Tensor:  # [B T, H]
        """Does what `run` does for T tokens per row, x [B T, H], in few launches, or for one in one
        kernel call if possible."""
        mlp, kernel = self.mlp, self.decide_block_step(x, cache).kernel
        if kernel is not None and T == 1:
            mixer: Any = self.mixer
            return mixer.block_step(kernel, x, self.mixer_norm, self.mlp_norm, mlp, cache)
        x = self.mixer.step(step_linear, x, self.mixer_norm, cache, T)
        pair = operands(mlp.gate_proj, mlp.up_proj)
        return step_swiglu(step_linear, x, self.mlp_norm, pair, mlp.down_proj)


class FlashRNNPreTrainedModel(RecurrentPreTrainedModel):
    """Base class of all flash_rnn models, with the initialisation of weights."""

    config: FlashRNNConfig
    _no_split_modules: ClassVar = ["FlashRNNBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RecurrentMixer | DiagonalMixer | FlashGRU | FlashLSTM):
            module.init_weights()
        elif isinstance(module, HeadwiseLinear):
            module.reset_parameters()
        if not self.config.is_diagonal or self.config.initializer_range is not None:
            return
        if isinstance(module, nn.Linear | nn.Embedding):  # as in open_lm, which the paper used
            deviation = module.weight.shape[1] ** -0.5
            blocks = getattr(module, "blocks", None)
            if blocks is not None:
                deviation *= (2 * blocks) ** -0.5
            init.trunc_normal_(module.weight, 0.0, deviation, -3 * deviation, 3 * deviation)


class FlashRNNModel(RecurrentModel, FlashRNNPreTrainedModel):
    """The flash_rnn base model: token ids or embeddings in, hidden states [B, T, H] out."""

    def __init__(self, config: FlashRNNConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [FlashRNNBlock(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.post_init()


class FlashRNNForCausalLM(RecurrentForCausalLM, FlashRNNPreTrainedModel, GenerationMixin):
    """The flash_rnn language model."""

    backbone_class = FlashRNNModel


class FlashRNNForSequenceClassification(
    RecurrentForSequenceClassification, FlashRNNPreTrainedModel
):
    """Classifies each sequence by the hidden state at its last token that is not padding."""

    backbone_class = FlashRNNModel


class FlashRNNForTokenClassification(RecurrentForTokenClassification, FlashRNNPreTrainedModel):
    """Classifies each token by the hidden state at it."""

    backbone_class = FlashRNNModel


__all__ = [
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNForTokenClassification",
    "FlashRNNModel",
    "FlashRNNPreTrainedModel",
]
