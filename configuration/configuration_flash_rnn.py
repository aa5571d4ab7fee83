"""Configuration of flash_rnn: a Llama-style stack whose mixer is a recurrent cell."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class FlashRNNConfig(PreTrainedConfig):
    """What a flash_rnn model is. The defaults are FlashRNN's 165M language model (arXiv 2412.07752).

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream, and of the cell's state over all heads.
        intermediate_size: inner width of the SwiGLU MLP.
        num_hidden_layers: number of blocks, each a cell and an MLP.
        num_heads: the cell's recurrent matrices are block-diagonal with this many blocks.
        cell: "lstm", "gru", "rnn" (Elman) or "slstm".
        nonlinearity: of the "rnn" cell: "tanh" or "relu". Other cells have no choice: leave "tanh".
        norm: "rms" or "layer" (without bias), before each cell, each MLP and the head.
        norm_eps: added to the variance in every norm.
        initializer_range: standard deviation of embeddings and projections at the start.
        grad_clip: bound of each element of the gradient through the recurrent product; 0 cuts it.
        tie_word_embeddings: whether the head uses the embedding's weight.
        use_cache: whether a forward call returns the states to continue from.
        pad_token_id, bos_token_id, eos_token_id: as in every transformers configuration.
        backend: "auto", "cuda", "cpu" or "reference". A choice at run time, not part of the model:
            it is never saved.
    """

    model_type = "flash_rnn"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_heads: int = 12
    cell: Literal["lstm", "gru", "rnn", "slstm"] = "lstm"
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    grad_clip: float | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    backend: Literal["auto", "cuda", "cpu", "reference"] = "auto"

    def validate_architecture(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, but must divide hidden_size = {self.hidden_size}"
            )

    def validate_numbers(self):
        for name in ("norm_eps", "initializer_range"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be a positive, finite number"
                )
        if self.grad_clip is not None and not self.grad_clip >= 0:
            raise ValueError(f"grad_clip is {self.grad_clip}, but must be None or a number >= 0")
        if self.nonlinearity != "tanh" and self.cell != "rnn":
            raise ValueError(
                f"nonlinearity is {self.nonlinearity!r}, but must be 'tanh' unless cell is 'rnn'; "
                f"cell is {self.cell!r}"
            )

    def validate_layer_type(self):
        """The base class knows only its own layer types; ours is registered by our cache."""

    @property
    def layer_types(self) -> list[str]:
        """One cache layer per entry: how DynamicCache and StaticCache find ours."""
        return ["recurrent_state"] * self.num_hidden_layers

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kernel_cell(self) -> str:
        """The cell's name among the kernel's."""
        return f"rnn_{self.nonlinearity}" if self.cell == "rnn" else self.cell

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output.pop("backend", None)
        return output
