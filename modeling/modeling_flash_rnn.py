"""flash_rnn: a Llama-style language model whose mixer is a recurrent cell.

Block: x + cell(norm(x)), then x + mlp(norm(x)); the cell has no output projection, and there are no
positions: order is what the state carries. Padding (left, right or between) and packed documents
need no care from the caller beyond `attention_mask`, and `position_ids`, `cu_seq_lens_q` or
`seq_idx`.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration.configuration_flash_rnn import FlashRNNConfig
from .layers import NO_BOUNDARIES, Boundaries, RecurrentMixer, find_boundaries


def make_norm(config: FlashRNNConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=False)


class FlashRNNMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: FlashRNNConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, H]
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class FlashRNNBlock(GradientCheckpointingLayer):
    def __init__(self, config: FlashRNNConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer_norm = make_norm(config)
        self.mixer = RecurrentMixer(config, layer_idx)
        self.mlp_norm = make_norm(config)
        self.mlp = FlashRNNMLP(config)

    # hidden_states is positional for checkpointing and for output_hidden_states; the cache goes by
    # its keyword, which checkpointing knows to take away: a second run must not update it again.
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        past_key_values: Cache | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
        **kwargs: Any,
    ) -> torch.Tensor:  # [B, T, H]
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        hidden_states = hidden_states + self.mixer(
            self.mixer_norm(hidden_states), cache, boundaries
        )
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


@auto_docstring
class FlashRNNPreTrainedModel(PreTrainedModel):
    config: FlashRNNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["FlashRNNBlock"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _is_stateful = True  # a state cannot be rolled back: assisted decoding is refused
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {"hidden_states": FlashRNNBlock}

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

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # transformers would judge by the name of the class


@auto_docstring
class FlashRNNModel(FlashRNNPreTrainedModel):
    def __init__(self, config: FlashRNNConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [FlashRNNBlock(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither is" if input_ids is None else "both are"
            raise ValueError(
                f"exactly one of input_ids and inputs_embeds must be given, but {given}"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            raise ValueError(
                "past_key_values is given, but must be None under gradient checkpointing, which "
                "runs every block twice"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        batch, length, _ = inputs_embeds.shape
        boundaries = find_boundaries(
            batch,
            length,
            attention_mask,
            position_ids,
            kwargs.get("cu_seq_lens_q"),
            kwargs.get("seq_idx"),
        )
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, past_key_values=past_key_values, boundaries=boundaries
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )


@auto_docstring
class FlashRNNForCausalLM(FlashRNNPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan: ClassVar = {"lm_head": "keep_full_weight"}

    def __init__(self, config: FlashRNNConfig):
        super().__init__(config)
        self.model = FlashRNNModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.FloatTensor | None = None,  # generate looks for it here
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The base class's, less what costs time: a decoded token is no padding and begins nothing.

        In a batch, rows that have ended go on reading padding until the last one ends: continue
        such a conversation from its text, not from the returned cache.
        """
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the cache already holds {input_ids.shape[1] - next_sequence_length} tokens, but "
                f"input_ids has {input_ids.shape[1]}: pass the whole text, or the new tokens and "
                "an attention_mask over the whole text"
            )
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if next_sequence_length == 1 and not is_first_iteration:
            inputs["attention_mask"] = inputs["position_ids"] = None
        return inputs

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        """Padding is all a recurrence has to know."""
        return attention_mask


class FlashRNNForSequenceClassification(GenericForSequenceClassification, FlashRNNPreTrainedModel):
    """Classifies by the state after each row's last token that is not padding."""

    def __init__(self, config: FlashRNNConfig):
        # past the generic __init__, which asks AutoModel: remote code is not registered there
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = FlashRNNModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = [
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNModel",
    "FlashRNNPreTrainedModel",
]
