"""Configuration of flash_mlstm: the architecture of xLSTM-7B and of Tiled Flash Linear Attention."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .recurrent_config import RecurrentConfig

# Further fields of transformers' xLSTMConfig and NX-AI's xLSTMLargeConfig: they choose how that code
# runs, and are not part of the model here.
HOW_THEY_RUN = (
    "chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "return_last_states",
    "autocast_kernel_dtype", "inference_state_dtype", "max_inference_chunksize",
    "norm_reduction_force_float32",
)  # fmt: skip
# Other fields of the two: every published model has these values, and others are refused.
THEIR_CHOICES = {"use_bias": False, "add_out_norm": True}
PUBLISHED = {"vocab_size": 50257}  # the GPT-2 tokenizer of the models below 7B


@strict
class FlashMLSTMConfig(RecurrentConfig):
    """The configuration of a flash_mlstm model. The defaults are xLSTM-7B (NX-AI/xLSTM-7b, arXiv
    2503.13427).

    The names are transformers' xLSTMConfig's; its aliases `embedding_dim` and `num_blocks`, which
    are NX-AI's own names, work too. Their switches between kernels are read and dropped.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks, each an mLSTM and a SwiGLU MLP.
        num_heads: heads of the mLSTM.
        qk_dim_factor: width of queries and of keys over all heads, in units of hidden_size.
        v_dim_factor: width of values over all heads, in units of hidden_size.
        ffn_proj_factor: inner width of the MLP in units of hidden_size, before rounding.
        ffn_round_up_to_multiple_of: the inner width of the MLP is rounded up to a multiple of this.
        input_gate: "exp" (xLSTM-7B) or "sigmoid" (mLSTMsig, arXiv 2503.14376), which has no
            normaliser and carries C alone.
        learnable_input_gate: False leaves the input gate at `input_gate_bias_init` for ever, whatever
            the token.
        input_gate_bias_init: the input gate's bias before training.
        gate_soft_cap: bound of the input and forget gates: cap tanh(x / cap).
        output_logit_soft_cap: bound of the logits, in the same way.
        norm_eps: added to the variance in every norm.
        head_norm: "layer" (without bias) or "rms", of every head's output.
        eps: added to the mLSTM's divisor in its stabilised scale; the sigmoid gate has none.
        weight_mode: "single" (a matrix each for q, k, v, output gate, input gate, forget gate) or
            "fused" (one for the first four, one for the other two, one for both of the MLP's).
        chunk_size: steps whose products the kernel takes together; None is the kernel's own choice.
            A choice at run time, like `backend`: it is never saved.
    """

    model_type = "flash_mlstm"
    attribute_map: ClassVar[dict[str, str]] = {
        "embedding_dim": "hidden_size",
        "num_blocks": "num_hidden_layers",
    }
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embeddings": "free_full_weight",
        "blocks.*": "free_full_weight",
        "out_norm": "keep_full_weight",
    }
    run_time_fields: ClassVar[tuple[str, ...]] = ("backend", "chunk_size")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **{
            f"flash_mlstm_{size}_{heads}heads": {
                **PUBLISHED,
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_heads": heads,
            }
            for size, width, layers, choices in (
                ("160m", 768, 12, (6, 12)),
                ("400m", 1024, 24, (8, 16)),
                ("1.4b", 2048, 24, (4, 8, 16)),
            )
            for heads in choices
        },
        "flash_mlstm_7b": {},
    }

    vocab_size: int = 50304
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_heads: int = 8
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    input_gate: Literal["exp", "sigmoid"] = "exp"
    learnable_input_gate: bool = True
    input_gate_bias_init: float = -10.0
    gate_soft_cap: float = 15.0
    output_logit_soft_cap: float = 30.0
    norm_eps: float = 1e-6
    head_norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    weight_mode: Literal["single", "fused"] = "single"
    chunk_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, only in THEIR_CHOICES.items():
            given = kwargs.pop(name, only)
            if given != only:
                raise ValueError(
                    f"{name} is {given}, but must be {only}: no published model differs"
                )
        theirs = [name for name in HOW_THEY_RUN if name in kwargs]
        if theirs:
            self.chunk_size = None  # the value in that file is for another kernel
        for name in theirs:
            del kwargs[name]
        self.base_model_tp_plan = self._split()  # type: ignore[misc]  # a tied head adds to it
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        self.require_sizes(
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "ffn_round_up_to_multiple_of",
        )
        self.require_positive(
            "qk_dim_factor", "v_dim_factor", "ffn_proj_factor", "gate_soft_cap",
            "output_logit_soft_cap", "norm_eps",
        )  # fmt: skip
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps is {self.eps}, but must be a finite number >= 0")
        if not abs(self.input_gate_bias_init) < float("inf"):
            raise ValueError(
                f"input_gate_bias_init is {self.input_gate_bias_init}, but must be finite"
            )
        if self.chunk_size is not None and not 1 <= self.chunk_size < 2**31:
            raise ValueError(
                f"chunk_size is {self.chunk_size}, but must be None or from 1 to 2147483647"
            )
        if self.intermediate_size < 1:
            raise ValueError(
                f"ffn_proj_factor is {self.ffn_proj_factor}, but must be at least 1 / hidden_size = "
                f"{1 / self.hidden_size:.3g}"
            )
        for name in ("qk_dim", "v_dim"):
            width = getattr(self, name)
            if not width or width % (8 * self.num_heads):
                raise ValueError(
                    f"{name}_factor makes a width of {width}, but it must be a multiple of "
                    f"8 num_heads = {8 * self.num_heads}"
                )
        if self.weight_mode == "fused" and not self.learnable_input_gate:
            raise ValueError(
                "weight_mode is 'fused', but must be 'single': the input gate is fixed"
            )

    def _split(self) -> dict[str, str]:
        """Returns the tensor-parallel plan: all matrices are split; every rank computes the whole
        mLSTM."""
        if self.weight_mode == "fused":
            wide, up = ["qkv_opreact"], {"proj_up_gate_z": "packed_colwise"}
        else:
            wide = ["q", "k", "v", "ogate_preact"]
            up = {"proj_up_gate": "colwise", "proj_up": "colwise"}
        mixer = dict.fromkeys(wide, "colwise_gather_output") | {"out_proj": "rowwise_split_input"}
        ffn = {**up, "proj_down": "rowwise"}
        return {
            "embeddings": "embedding_rowwise",  # transformers adds it for the name embed_tokens alone
            **{f"blocks.*.mlstm_layer.{name}": style for name, style in mixer.items()},
            **{f"blocks.*.ffn.{name}": style for name, style in ffn.items()},
        }

    @property
    def qk_dim(self) -> int:
        """Width of the queries over all heads, and of the keys."""
        return int(self.hidden_size * self.qk_dim_factor)

    @property
    def v_dim(self) -> int:
        return int(self.hidden_size * self.v_dim_factor)

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP, rounded as transformers and NX-AI round it."""
        multiple = self.ffn_round_up_to_multiple_of
        return int((self.hidden_size * self.ffn_proj_factor + multiple - 1) // multiple) * multiple
