"""Configuration of flash_rnn: a Llama-style stack whose mixer is a recurrent cell."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .recurrent_config import RecurrentConfig

DIAGONAL = ("flash_gru", "flash_lstm")
SIZES = {  # name: layers, heads, width, MLP's width (arXiv 2510.21450, its table 3)
    "400m": (24, 4, 1024, 2816),
    "1b": (24, 4, 2048, 5632),
    "3b": (32, 2, 2560, 6912),
    "7b": (32, 4, 4096, 11008),
}


def published_presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}
    for cell in ("lstm", "slstm"):  # arXiv 2412.07752
        presets[f"{cell}_165m"] = {"cell": cell, "num_heads": 12, "norm": "layer"}
        presets[f"{cell}_165m_1head"] = {"cell": cell, "num_heads": 1, "norm": "layer"}
    for cell in DIAGONAL:
        for name, (layers, heads, width, inner) in SIZES.items():
            presets[f"{cell}_{name}"] = {
                "cell": cell, "vocab_size": 50432, "num_hidden_layers": layers, "num_heads": heads,
                "hidden_size": width, "intermediate_size": inner, "norm_eps": 1e-5,
            }  # fmt: skip
    return presets


@strict
class FlashRNNConfig(RecurrentConfig):
    """The configuration of a flash_rnn model. The defaults are FlashRNN's 165M language model
    (arXiv 2412.07752).

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream, and of the cell's state over all heads.
        intermediate_size: inner width of the SwiGLU MLP.
        num_hidden_layers: number of blocks, each a cell and an MLP.
        num_heads: the cell's matrices are block-diagonal with this many blocks: the recurrent ones,
            or the input projection of "flash_gru" and "flash_lstm".
        cell: "lstm", "gru", "rnn" (Elman), "slstm", or with a diagonal recurrence "flash_gru" or
            "flash_lstm", whose mixer has a convolution, a gate and an output projection of its own.
        nonlinearity: of the "rnn" cell: "tanh" or "relu". Other cells have no choice: leave "tanh".
        norm: "rms" or "layer" (without bias), before each cell, each MLP and the head.
        norm_eps: added to the variance in every norm.
        initializer_range: standard deviation of embeddings and projections at the start. None for
            what was published with the cell: 0.02; for the diagonal ones fan-in^-1/2, cut off at
            three times that, and less with depth in the projections back to the residual stream.
        grad_clip: bound of each element of the gradient through the recurrent product; 0 cuts it.
        conv_kernel: width of the causal convolution before a diagonal cell.
        max_recurrent: bound of a diagonal cell's recurrent weights and peepholes; None for none.
        save: "gates" or "recompute": what the other cells keep for the backward pass. Never saved.
        method, tol, max_iters: how a diagonal cell runs over time, "auto", "sequential",
            "multiple_shooting" or "newton"; see the kernel's flash_gru. Never saved.
    """

    model_type = "flash_rnn"
    run_time_fields: ClassVar = ("backend", "save", "method", "tol", "max_iters")
    presets: ClassVar = published_presets()
    # Only the MLPs are split: equal shares of in_proj's columns would not hold whole sets of gates.
    base_model_tp_plan: ClassVar = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_heads: int = 12
    cell: Literal["lstm", "gru", "rnn", "slstm", "flash_gru", "flash_lstm"] = "lstm"
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    initializer_range: float | None = None
    grad_clip: float | None = None
    conv_kernel: int = 4
    max_recurrent: float | None = 0.5
    save: Literal["gates", "recompute"] = "gates"
    method: Literal["auto", "sequential", "multiple_shooting", "newton"] = "auto"
    tol: float | None = None
    max_iters: int | None = None

    def validate_architecture(self):
        self.require_sizes(
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads"
        )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, but must divide hidden_size = {self.hidden_size}"
            )

    def validate_numbers(self):
        self.require_positive("norm_eps")
        for name in ("initializer_range", "max_recurrent", "tol"):
            if getattr(self, name) is not None:
                self.require_positive(name)
        if self.max_iters is not None and not 1 <= self.max_iters < 2**31:
            raise ValueError(
                f"max_iters is {self.max_iters}, but must be None or from 1 to 2147483647"
            )
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel is {self.conv_kernel}, but must be at least 2")
        if self.grad_clip is not None and not self.grad_clip >= 0:
            raise ValueError(f"grad_clip is {self.grad_clip}, but must be None or a number >= 0")

    def validate_choices(self):
        """Refuses options that the chosen cell does not have, which would do nothing."""
        self._only(("rnn",), "nonlinearity")
        self._only(("lstm", "gru", "rnn", "slstm"), "grad_clip", "save")
        self._only(DIAGONAL, "method", "tol", "max_iters", "conv_kernel", "max_recurrent")

    def _only(self, cells: tuple[str, ...], *names: str) -> None:
        for name in names:
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and self.cell not in cells:
                raise ValueError(
                    f"{name} is {value!r}, but must be {default!r} unless cell is "
                    f"{' or '.join(map(repr, cells))}; cell is {self.cell!r}"
                )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def is_diagonal(self) -> bool:
        return self.cell in DIAGONAL

    @property
    def kernel_cell(self) -> str:
        """The name of the cell in its kernel."""
        return f"rnn_{self.nonlinearity}" if self.cell == "rnn" else self.cell
