"""Configuration of flash_rnn: a Llama-style stack whose mixer is a recurrent cell."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .recurrent_config import RecurrentConfig


@strict
class FlashRNNConfig(RecurrentConfig):
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
    """

    model_type = "flash_rnn"

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

    def validate_architecture(self):
        self.require_sizes(
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads"
        )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, but must divide hidden_size = {self.hidden_size}"
            )

    def validate_numbers(self):
        self.require_positive("norm_eps", "initializer_range")
        if self.grad_clip is not None and not self.grad_clip >= 0:
            raise ValueError(f"grad_clip is {self.grad_clip}, but must be None or a number >= 0")
        if self.nonlinearity != "tanh" and self.cell != "rnn":
            raise ValueError(
                f"nonlinearity is {self.nonlinearity!r}, but must be 'tanh' unless cell is 'rnn'; "
                f"cell is {self.cell!r}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kernel_cell(self) -> str:
        """The cell's name among the kernel's."""
        return f"rnn_{self.nonlinearity}" if self.cell == "rnn" else self.cell
