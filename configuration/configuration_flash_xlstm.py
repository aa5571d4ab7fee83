"""Configuration of flash_xlstm: xLSTM[a:b] of the xLSTM paper, mLSTM and sLSTM blocks in one stack."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .recurrent_config import RecurrentConfig


def round_up(x: float, multiple: int) -> int:
    return -int(-x // multiple) * multiple


@strict
class FlashXLSTMConfig(RecurrentConfig):
    """The configuration of a flash_xlstm model (xLSTM, arXiv 2405.04517, in the form of the `xlstm`
    package).

    xLSTM[a:b] has a mLSTM blocks for b sLSTM blocks; `slstm_at` says which are sLSTM blocks.
    xLSTM[1:0] is the default, xLSTM[0:1] is slstm_at="all".

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream, and of an sLSTM's state over all heads.
        num_hidden_layers: number of blocks.
        slstm_at: indices of the sLSTM blocks, from 0; "all"; None for none.
        num_heads: heads of an mLSTM.
        slstm_num_heads: heads of an sLSTM; None for `num_heads`.
        inner_size: width inside an mLSTM block; None for 2 hidden_size, rounded up to 64.
        intermediate_size: inner width of the GeGLU after an sLSTM; None for 1.3 hidden_size, rounded
            up to 64.
        conv_kernel_size: tokens that the causal convolutions see.
        qkv_block_size: an mLSTM's q, k and v mix so many channels, in blocks along the diagonal.
        norm_eps: added to the variance in every norm.
        eps: added to the mLSTM's divisor in its stabilised scale.
        chunk_size: steps whose products the mLSTM kernel takes together; None is its own choice. A
            choice at run time, like `backend`: it is never saved.
    """

    model_type = "flash_xlstm"
    run_time_fields: ClassVar[tuple[str, ...]] = ("backend", "chunk_size")

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 24
    slstm_at: list[int] | Literal["all"] | None = None
    num_heads: int = 4
    slstm_num_heads: int | None = None
    inner_size: int | None = None
    intermediate_size: int | None = None
    conv_kernel_size: int = 4
    qkv_block_size: int = 4
    norm_eps: float = 1e-5
    eps: float = 1e-6
    chunk_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.slstm_num_heads is None:
            self.slstm_num_heads = self.num_heads
        if self.inner_size is None:
            self.inner_size = round_up(2 * self.hidden_size, 64)
        if self.intermediate_size is None:
            self.intermediate_size = round_up(1.3 * self.hidden_size, 64)
        self.base_model_tp_plan = self._split()  # type: ignore[misc]  # a tied head adds to it
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        self.require_sizes(
            "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "slstm_num_heads",
            "inner_size", "intermediate_size", "qkv_block_size",
        )  # fmt: skip
        self.require_positive("norm_eps")
        if self.conv_kernel_size < 2:
            raise ValueError(f"conv_kernel_size is {self.conv_kernel_size}, but must be at least 2")
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps is {self.eps}, but must be a finite number >= 0")
        if self.chunk_size is not None and not 1 <= self.chunk_size < 2**31:
            raise ValueError(
                f"chunk_size is {self.chunk_size}, but must be None or from 1 to 2147483647"
            )
        at, layers = self.slstm_at, self.num_hidden_layers
        if at is not None and at != "all" and any(not 0 <= i < layers for i in at):
            raise ValueError(
                f"slstm_at is {at!r}, but must be 'all', or indices of blocks, 0 to {layers - 1}"
            )

    def validate_heads(self):
        if self.has_mlstm:
            self._require_divides("num_heads", "inner_size", 8)
            self._require_divides("qkv_block_size", "inner_size")
        if self.has_slstm:
            self._require_divides("slstm_num_heads", "hidden_size")

    def _require_divides(self, name: str, width: str, times: int = 1) -> None:
        count, whole = getattr(self, name), getattr(self, width)
        if whole % (times * count):
            times_it = f"{times} {name}" if times > 1 else "it"
            raise ValueError(f"{name} is {count}, but {times_it} must divide {width} = {whole}")

    def is_slstm(self, layer_idx: int) -> bool:
        return self.slstm_at == "all" or layer_idx in (self.slstm_at or ())

    def _split(self) -> dict[str, str]:
        """Returns the tensor-parallel plan: dense matrices are split; every rank has all other
        weights."""
        plan: dict[str, str] = {}
        if self.has_mlstm:
            plan["layers.*.mixer.proj_up"] = "colwise_gather_output"
            plan["layers.*.mixer.proj_down"] = "rowwise_split_input"
        if self.has_slstm:
            plan["layers.*.mlp.proj_up"] = "packed_colwise"
            plan["layers.*.mlp.proj_down"] = "rowwise"
        return plan

    @property
    def has_slstm(self) -> bool:
        return any(self.is_slstm(i) for i in range(self.num_hidden_layers))

    @property
    def has_mlstm(self) -> bool:
        return not all(self.is_slstm(i) for i in range(self.num_hidden_layers))
