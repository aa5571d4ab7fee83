"""flash_mlstm: the language model of xLSTM-7B (arXiv 2503.13427) and of Tiled Flash Linear Attention
(arXiv 2503.14376), on the tfla kernel.

Block: x + mlstm(norm(x)), then x + mlp(norm(x)). The mLSTM's input and forget gates and the logits
are soft-capped; a head's output goes through a norm of its own and the output gate.

The weights have NX-AI/xLSTM-7b's names, so

    FlashMLSTMForCausalLM.from_pretrained("NX-AI/xLSTM-7b", dtype="bfloat16", device_map="auto")

loads it as it is, and what `save_pretrained` writes is loaded by transformers' own xLSTM. NX-AI's
package calls the embedding differently (`embedding.weight`): that is read too.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init

from .configuration.configuration_flash_mlstm import FlashMLSTMConfig
from .layers.decode_linear import (
    ROWS,
    FusedStep,
    StepLinear,
    StepParts,
    find_step_linear,
    norm_options,
    operands,
    step_swiglu,
)
from .layers.feed_forward import cast_once
from .layers.mlstm import GateLinear, HeadNorm, residual_linear, run_mlstm, split_heads
from .recurrent_block import RecurrentBlock
from .recurrent_model import (
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
    RecurrentPreTrainedModel,
)
from .state.boundaries import NO_BOUNDARIES, Boundaries
from .state.cache import RecurrentStateLayer

NX_AI_NAMES = {r"^embedding\.weight$": "backbone.embeddings.weight"}
FORGET_GATE_BIAS = 3.0, 6.0  # initial values, from the first head to the last


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Bounds x smoothly to (-cap, cap): cap tanh(x / cap), computed in fp32 or wider."""
    return cap * torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)) / cap)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def residual(config: FlashMLSTMConfig, inputs: int) -> nn.Linear:
    std = 2 / (config.num_hidden_layers * math.sqrt(inputs))
    return residual_linear(inputs, config.hidden_size, std)


class FlashMLSTMMixer(nn.Module):
    """The mLSTM mixer: out_proj(sigmoid(o) norm(mlstm(q, k, v, i, f))), all projected from the
    input."""

    def __init__(self, config: FlashMLSTMConfig):
        super().__init__()
        self.config = config
        # What the weights' shapes follow from. A configuration is slow to read, so a call does not.
        width, heads = config.hidden_size, config.num_heads
        self.heads, self.widths = heads, (config.qk_dim, config.qk_dim, config.v_dim, config.v_dim)
        self.fused, self.has_input_gate = config.weight_mode == "fused", config.learnable_input_gate
        _, qk, _, v = self.widths
        forget = torch.linspace(*FORGET_GATE_BIAS, heads, device="cpu")
        enter = torch.full_like(forget, config.input_gate_bias_init)
        if self.fused:
            self.qkv_opreact = linear(width, 2 * qk + 2 * v)
            self.ifgate_preact = GateLinear(width, torch.cat([enter, forget]))
        else:
            self.q, self.k = linear(width, qk), linear(width, qk)
            self.v, self.ogate_preact = linear(width, v), linear(width, v)
            if self.has_input_gate:
                self.igate_preact = GateLinear(width, enter)
            self.fgate_preact = GateLinear(width, forget)
        self.multihead_norm = HeadNorm(heads, v, config.norm_eps, config.head_norm)
        self.out_proj = residual(config, v)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        *operands, i, f = self.project(hidden_states)
        gates = soft_cap(torch.stack((i, f)), self.config.gate_soft_cap)
        return self.out_proj(self.mix([*operands, *gates.unbind()], cache, boundaries))

    def mix(
        self,
        operands: list[torch.Tensor],  # what `project` returns, with bounded gates
        cache: RecurrentStateLayer | None,
        boundaries: Boundaries,
    ) -> torch.Tensor:  # [B, T, v_dim]
        config, input_gate = self.config, self.config.input_gate
        q, k, v, o = (split_heads(x, self.heads) for x in operands[:4])
        h, state = run_mlstm(
            config, (q, k, v, *operands[4:]), self.multihead_norm, cache, boundaries, o,
            input_gate=input_gate, eps=config.eps if input_gate == "exp" else 0.0,
        )  # fmt: skip
        if cache is not None:
            cache.update_states(q.shape[1], cell=state)
        return h

    @property
    def projections(self) -> tuple[list[nn.Linear], list[nn.Linear]]:
        """The projection modules: those whose outputs join to q, k, v, o, and those for i, f."""
        if self.fused:
            return [self.qkv_opreact], [self.ifgate_preact]
        gates = [self.igate_preact] if self.has_input_gate else []
        return [self.q, self.k, self.v, self.ogate_preact], [*gates, self.fgate_preact]

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Projects x to the pre-activations q, k [B, T, qk_dim], v, o [B, T, v_dim], i, f [B, T,
        heads]."""
        wide, gates = self.projections
        return self.divide([m(x) for m in (*wide, *gates)])

    def divide(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Splits the outputs of the modules in `projections` into q, k, v, o, i, f."""
        if self.fused:
            return [*outputs[0].split(self.widths, dim=-1), *outputs[1].chunk(2, dim=-1)]
        if self.has_input_gate:
            return list(outputs)
        *operands, f = outputs
        return [*operands, torch.full_like(f, self.config.input_gate_bias_init), f]


class FlashMLSTMFeedForward(nn.Module):
    """A SwiGLU MLP (arXiv 2002.05202) whose parameters have NX-AI's names."""

    def __init__(self, config: FlashMLSTMConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.fused = config.weight_mode == "fused"
        if self.fused:
            self.proj_up_gate_z = linear(width, 2 * inner)
        else:
            self.proj_up_gate, self.proj_up = linear(width, inner), linear(width, inner)
        self.proj_down = residual(config, inner)

    @property
    def projections(self) -> list[nn.Linear]:
        return [self.proj_up_gate_z] if self.fused else [self.proj_up_gate, self.proj_up]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, H]
        x = cast_once(x)
        if self.fused:
            gate, up = self.proj_up_gate_z(x).chunk(2, dim=-1)
        else:
            gate, up = self.proj_up_gate(x), self.proj_up(x)
        return self.proj_down(nn.functional.silu(gate) * up)


class FlashMLSTMBlock(FusedStep, RecurrentBlock):
    def __init__(self, config: FlashMLSTMConfig, layer_idx: int):
        super().__init__(layer_idx)
        self.norm_mlstm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlstm_layer = FlashMLSTMMixer(config)
        self.norm_ffn = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = FlashMLSTMFeedForward(config)

    def run(
        self, hidden_states: torch.Tensor, cache: RecurrentStateLayer | None, boundaries: Boundaries
    ) -> torch.Tensor:  # [B, T, H]
        fused = self.run_fused(hidden_states, cache, boundaries)
        if fused is not None:
            return fused
        mixed = self.mlstm_layer(self.norm_mlstm(hidden_states), cache, boundaries)
        hidden_states = hidden_states + mixed
        return hidden_states + self.ffn(self.norm_ffn(hidden_states))

    @property
    def step_parts(self) -> StepParts | str:
        mixer, ffn = self.mlstm_layer, self.ffn
        if type(mixer) is not FlashMLSTMMixer or type(ffn) is not FlashMLSTMFeedForward:
            return "the mixer or the MLP is another class"
        if not mixer.has_input_gate:
            return "the input gate is not learned"
        wide, gates = mixer.projections
        if any(type(gate) is not GateLinear for gate in gates):
            return "a gate is another class than GateLinear"
        layers = [*wide, *gates, mixer.out_proj, *ffn.projections, ffn.proj_down]
        return StepParts(
            [*layers, self.norm_mlstm, self.norm_ffn], (mixer, ffn), mixer.config.backend
        )

    def step(
        self,
        step_linear: StepLinear,
        x: torch.Tensor,
        cache: RecurrentStateLayer | None,
        T: int = 1,
    ) -> torch.Tensor:  # [B T, H]
        """Does what `run` does for T tokens per row, x [B T, H], in few launches."""
        mixer, ffn = self.mlstm_layer, self.ffn
        wide, gates = mixer.projections
        outputs = step_linear(
            x, **operands(*wide, *gates), biases=[m.bias for m in gates], capped=len(gates),
            cap=mixer.config.gate_soft_cap, **norm_options(self.norm_mlstm),
        )  # fmt: skip
        inputs = [y.unflatten(0, (-1, T)) for y in mixer.divide(outputs)]
        h = mixer.mix(inputs, cache, NO_BOUNDARIES)
        x = step_linear(h.flatten(0, 1), **operands(mixer.out_proj), residual=x)[0]
        pair = operands(*ffn.projections)
        if ffn.fused:
            pair = {name: list(tensors[0].chunk(2)) for name, tensors in pair.items()}
        return step_swiglu(step_linear, x, self.norm_ffn, pair, ffn.proj_down)


class FlashMLSTMPreTrainedModel(RecurrentPreTrainedModel):
    """Base class of all flash_mlstm models: checkpoint names and the initialisation of weights."""

    config: FlashMLSTMConfig
    base_model_prefix = "backbone"
    _embeddings = "embeddings"
    _blocks = "blocks"
    _last_norm = "out_norm"
    _no_split_modules: ClassVar = ["FlashMLSTMBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises weights as published: normal with deviation sqrt(2 / 5H) (Nguyen and Salazar
        2019), smaller in residual projections. Gates start with zero weights: input biases are
        `input_gate_bias_init`, forget biases go from 3 to 6.
        """
        super()._init_weights(module)
        if isinstance(module, GateLinear | HeadNorm):
            module.init_weights()
        elif isinstance(module, nn.Linear | nn.Embedding):
            std = math.sqrt(2 / (5 * self.config.hidden_size))
            init.normal_(module.weight, std=getattr(module, "std", std))

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict | None = None, **kwargs: Any) -> Any:
        """Loads a model as transformers does, and also maps the names of NX-AI's package."""
        return super().from_pretrained(*args, key_mapping=key_mapping or NX_AI_NAMES, **kwargs)

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> Any:
        """Saves under transformers' names, whatever names the checkpoint was loaded from."""
        return super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)


class FlashMLSTMModel(RecurrentModel, FlashMLSTMPreTrainedModel):
    """The flash_mlstm base model: token ids or embeddings in, hidden states [B, T, H] out."""

    def __init__(self, config: FlashMLSTMConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            [FlashMLSTMBlock(config, i) for i in range(config.num_hidden_layers)]
        )
        self.out_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()


class FlashMLSTMForCausalLM(RecurrentForCausalLM, FlashMLSTMPreTrainedModel, GenerationMixin):
    """The flash_mlstm language model; its logits are soft-capped, in fp32 or wider."""

    backbone_class = FlashMLSTMModel
    fused_head_rows = ROWS
    _tied_weights_keys: ClassVar = {"lm_head.weight": "backbone.embeddings.weight"}

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:  # [..., H] -> [..., V]
        config, head, step_linear = self.config, self.lm_head, None
        compiles = torch.compiler.is_compiling()  # the batch size is open then
        if hidden_states.dim() == 3 and not compiles and hidden_states.shape[0] <= ROWS:
            step_linear = find_step_linear(hidden_states, config.backend, [head])
        if step_linear is not None:
            options = {"capped": 1, "cap": config.output_logit_soft_cap}
            return step_linear(hidden_states[:, 0], **operands(head), **options)[0][:, None]
        return soft_cap(head(hidden_states), config.output_logit_soft_cap)


class FlashMLSTMForSequenceClassification(
    RecurrentForSequenceClassification, FlashMLSTMPreTrainedModel
):
    """Classifies each sequence by the hidden state at its last token that is not padding."""

    base_model_prefix = "backbone"  # the generic class would call it "model"
    backbone_class = FlashMLSTMModel


class FlashMLSTMForTokenClassification(RecurrentForTokenClassification, FlashMLSTMPreTrainedModel):
    """Classifies each token by the hidden state at it."""

    base_model_prefix = "backbone"  # the generic class would call it "model"
    backbone_class = FlashMLSTMModel


__all__ = [
    "FlashMLSTMForCausalLM",
    "FlashMLSTMForSequenceClassification",
    "FlashMLSTMForTokenClassification",
    "FlashMLSTMModel",
    "FlashMLSTMPreTrainedModel",
]
