"""Base classes of all model families: the loop over blocks, the heads, and generation.

A family `<F>` is a configuration (configuration/recurrent_config.py), blocks and a few lines each of

    class <F>Block(RecurrentBlock)                                 `run`: one block (recurrent_block.py)
    class <F>PreTrainedModel(RecurrentPreTrainedModel)             config, names, `_init_weights`
    class <F>Model(RecurrentModel, <F>PreTrainedModel)             __init__: embeddings, blocks, norm
    class <F>ForCausalLM(RecurrentForCausalLM, <F>PreTrainedModel, GenerationMixin)  `backbone_class`
    class <F>ForSequenceClassification(RecurrentForSequenceClassification, ...)  the same
    class <F>ForTokenClassification(RecurrentForTokenClassification, ...)        the same

(transformers wants to see GenerationMixin among the bases themselves).

Padding (left, right or in between) is given by `attention_mask`, and packed documents by
`position_ids`, `cu_seq_lens_q` or `seq_idx`; the caller need do nothing else.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .generation.engine import DecodeEngine
from .generation.mixin import RecurrentGeneration
from .layers.causal_conv import CausalConv1d
from .layers.decode_linear import ROWS, FusedHead, find_step_linear, operands
from .quantization.config import check_trainable
from .quantization.linear import QuantizedLinear
from .recurrent_block import RecurrentBlock
from .state.assisted import tried_tokens
from .state.boundaries import check_tensors, cut_prompt, find_boundaries, join_chunks
from .state.cache import CACHE, NAMES, check_cache, one_cache


class RecurrentPreTrainedModel(PreTrainedModel):
    """Base class of all models. A family adds `config`, `_no_split_modules` and `_init_weights`."""

    base_model_prefix = "model"
    _embeddings = "embed_tokens"
    _blocks = "layers"
    _last_norm = "norm"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement: ClassVar = list(NAMES)
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {"hidden_states": RecurrentBlock}

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self.base_model, self._embeddings)

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self.base_model, self._embeddings, value)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CausalConv1d):
            module.reset_parameters()  # torch's initialisation, not initializer_range's


class RecurrentModel:
    """Mixin with the forward pass of a base model: embeddings, blocks, norm."""

    gradient_checkpointing = False

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self: Any,  # a mixin of PreTrainedModel
        input_ids: torch.LongTensor | None = None,  # [B, T]
        attention_mask: torch.Tensor | None = None,  # [B, >= T], 0 = padding
        position_ids: torch.LongTensor | None = None,  # [B or 1, T], 0 = a document begins
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,  # [B, T, H]
        use_cache: bool | None = None,
        cache: Cache | None = None,  # past_key_values, as transformers calls it from 5.24 on
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Runs the model on tokens or embeddings: -> last_hidden_state [B, T, H], past_key_values.

        With `use_cache`, or a cache given, `past_key_values` is a DynamicCache or StaticCache of
        states to continue from, detached from the graph. Documents packed into one row are told
        apart by position_ids, or by the keywords seq_idx [B or 1, T] or cu_seq_lens_q [S + 1].
        ValueError names an argument whose shape does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither is" if input_ids is None else "both are"
            raise ValueError(
                f"exactly one of input_ids and inputs_embeds must be given, but {given}"
            )
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        past_key_values = one_cache(past_key_values, cache)
        trains = self.training and torch.is_grad_enabled()
        checkpoints = self.gradient_checkpointing and trains
        if trains:
            check_trainable(self)
        if past_key_values is not None and checkpoints:
            raise ValueError(
                "past_key_values is given, but must be None under gradient checkpointing, which "
                "runs every block twice"
            )
        if use_cache and past_key_values is None and not checkpoints:
            past_key_values = DynamicCache(config=self.config)
        if inputs_embeds.dim() != 3:
            shape = list(inputs_embeds.shape if input_ids is None else input_ids.shape)
            name = "inputs_embeds" if input_ids is None else "input_ids"
            wanted = "[B, T, H]" if input_ids is None else "[B, T]"
            raise ValueError(f"{name} has shape {shape}, but must be {wanted}")
        batch, length, _ = inputs_embeds.shape
        if past_key_values is not None:
            check_cache(past_key_values, self.config.num_hidden_layers, batch)
        boundaries = find_boundaries(
            batch, length, attention_mask, position_ids,
            kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"),
        )  # fmt: skip
        hidden_states = inputs_embeds
        for block in getattr(self, self._blocks):
            hidden_states = block(
                hidden_states, past_key_values=past_key_values, boundaries=boundaries
            )
        return BaseModelOutputWithPast(
            last_hidden_state=getattr(self, self._last_norm)(hidden_states),
            **{CACHE: past_key_values},
        )


class RecurrentForCausalLM(FusedHead, RecurrentGeneration):
    """A language model: the base model and a head; `backbone_class` is the family's base model.

    decoder        the DecodeEngine
    prompt_tokens  a longer prompt, counted over all rows, is read into the cache in chunks of this
                   many tokens, which bounds the memory that it needs
    """

    prompt_tokens = 32768
    backbone_class: ClassVar[Any]
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan: ClassVar = {"lm_head": "keep_full_weight"}
    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: Any):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decoder = DecodeEngine(self)
        self.post_init()

    # called on every copy, also a shallow one
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.decoder = DecodeEngine(self, self.decoder.mode)

    def get_decoder(self) -> Any:
        """Returns the base model; transformers' own method would return `decoder`, the engine."""
        return getattr(self, self.base_model_prefix)

    def set_decoder(self, decoder: Any) -> None:
        """Sets the base model."""
        setattr(self, self.base_model_prefix, decoder)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # .to, .half, .cuda
        self.decoder.release()
        return super()._apply(fn, recurse)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # GenerationMixin says no to class names with "xlstm"

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:  # [..., H] -> [..., V]
        one = hidden_states.dim() == 3
        step = one and find_step_linear(hidden_states, self.config.backend, [self.lm_head])
        if not step:
            return self.lm_head(hidden_states)
        weight, x = self.lm_head.weight, hidden_states[:, 0]
        if x.shape[0] <= ROWS or isinstance(self.lm_head, QuantizedLinear):
            return step(x, **operands(self.lm_head))[0][:, None]
        # As columns: rows of 50,257 logits are not aligned, and take cuBLAS 155 us instead of 25.
        return (weight @ x.mT).mT[:, None]

    def next_logits(self, input_ids: torch.Tensor, past_key_values: Cache) -> torch.Tensor:
        """Decodes one token per row, or reads a few, [B, T] -> [B, T, V]; the engine records it."""
        backbone = getattr(self, self.base_model_prefix)
        outputs = backbone(input_ids=input_ids, past_key_values=past_key_values)
        return self.logits_of_few(outputs.last_hidden_state, past_key_values)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,  # [B, T]
        attention_mask: torch.Tensor | None = None,  # [B, >= T], 0 = padding
        position_ids: torch.LongTensor | None = None,  # [B or 1, T], 0 = a document begins
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,  # [B, T, H]
        labels: torch.LongTensor | None = None,  # [B, T], shifted inside; -100 = no loss
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,  # how many of the last positions, or which; 0 = all
        cache: Cache | None = None,  # past_key_values, as transformers calls it from 5.24 on
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Returns logits [B, T or fewer, V], and with `labels` the mean loss, its sum divided by
        num_items_in_batch if that is passed, as Trainer does."""
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
        past_key_values = one_cache(past_key_values, cache)
        others = {
            "attention_mask": attention_mask, "position_ids": position_ids, "labels": labels,
            "inputs_embeds": inputs_embeds, "logits_to_keep": logits_to_keep, **kwargs,
        }  # fmt: skip
        logits = self.decoder.step(self, input_ids, past_key_values, others)
        if logits is None:
            input_ids, logits = self._read_tried(input_ids, past_key_values, others)
        if logits is not None:
            return CausalLMOutputWithPast(logits=logits, **{CACHE: past_key_values})
        backbone, rest = getattr(self, self.base_model_prefix), dict(kwargs, use_cache=use_cache)
        chunks: list[Any] = [(input_ids, inputs_embeds, position_ids, attention_mask)]
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        length = given.shape[1] if labels is None and getattr(given, "ndim", 0) > 1 else 0
        tried = tried_tokens(length, logits_to_keep, past_key_values, attention_mask, position_ids)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1 and labels is None
        if (last or tried) and past_key_values is not None:
            chunks = cut_prompt(
                *chunks[0], tokens=self.prompt_tokens, cache=past_key_values, rest=rest, tried=tried
            )
        hidden_states: list[Any] = []
        for ids, embeds, positions, mask in chunks:  # the caller gets the last chunk's outputs
            if tried and hidden_states and len(hidden_states) == len(chunks) - 1:
                for layer in past_key_values.layers:
                    layer.keep_past()
            outputs = backbone(
                input_ids=ids, attention_mask=mask, position_ids=positions,
                past_key_values=past_key_values, inputs_embeds=embeds, **rest,
            )  # fmt: skip
            hidden_states.append(outputs.hidden_states)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits_of_few(outputs.last_hidden_state[:, keep], past_key_values)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=join_chunks(hidden_states),
            **{CACHE: getattr(outputs, CACHE)},
        )


class RecurrentForSequenceClassification(GenericForSequenceClassification):
    """Classifies each sequence by the hidden state at its last token that is not padding."""

    backbone_class: ClassVar[Any]

    def __init__(self, config: Any):
        # past the generic __init__, which asks AutoModel: remote code is not registered there
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class RecurrentForTokenClassification(GenericForTokenClassification):
    """Classifies each token by the hidden state at it."""

    backbone_class: ClassVar[Any]

    def __init__(self, config: Any):
        super(GenericForTokenClassification, self).__init__(config)  # as above
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", 0.0))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
