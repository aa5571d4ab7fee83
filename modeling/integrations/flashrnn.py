"""The function and the configuration of the package flashrnn (arXiv 2412.07752), on our kernels.

    from flashcell.integrations.flashrnn import FlashRNNConfig, flashrnn

stands for `from flashrnn import FlashRNNConfig, flashrnn`; flashcell.flashrnn is the same function.

Dimensions: B batch, T time, S states, G gates, N heads (flashrnn's H), D width of a head, P width of
the previous state, which is D.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..hub.kernel_loader import load_kernel

BACKENDS = ("vanilla", "vanilla_fwbw", "cuda", "cuda_fused", "triton_fused")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CELLS = {"lstm": "lstm", "gru": "gru", "elman": "rnn_tanh", "slstm": "slstm"}
# The rows of flashrnn's gates that are r, z, n of ours; its bias has the recurrent part of n first.
GRU_WEIGHT, GRU_BIAS = [1, 2, 0], [1, 2, 3, 0]
LAYOUTS = {
    "input_shape": ("BTGHD", "TBGHD"),
    "recurrent_shape": ("GHDP", "HGDP", "HPGD", "HPDG"),
    "bias_shape": ("GHD", "HGD", "HDG"),
    "output_shape": ("SBTHD", "STBHD", "SBHTD"),
}


@dataclass
class FlashRNNConfig:
    """The layouts and options of `flashrnn`, named as flashrnn's own.

    The letters of a shape are its dimensions from the first to the last. What else flashrnn's
    configuration has (tiles, dtypes of single operands, constants) is not needed here, and an object
    of flashrnn's class serves as well as one of this.
    """

    backend: str = "cuda_fused"  # any of flashrnn's: the kernel of the tensors' device runs
    function: str = "lstm"
    gradient_recurrent_cut: bool = False
    gradient_recurrent_clipval: float | None = None
    forward_clipval: float | None = None
    hidden_dim: int = -1
    num_heads: int = -1
    head_dim: int = -1
    batch_size: int = 8
    input_shape: str = "BTGHD"
    output_shape: str = "SBTHD"
    recurrent_shape: str = "GHDP"
    bias_shape: str = "GHD"
    dtype: str = "bfloat16"
    dtype_w: str | None = None
    enable_automatic_mixed_precision: bool = True
    initial_val: Any = 0.0


def flashrnn(
    Wx: torch.Tensor,
    R: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor | None = None,
    function: str = "lstm",
    config: Any = None,
    backend: str = "cuda_fused",
    dtype: str = "bfloat16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a recurrent cell as flashrnn.flashrnn does, with its arguments, layouts and results.

    Wx      [B, T, G, N, D]  pre-activations from the input (config.input_shape)
    R       [G, N, D, P]     recurrent weight (config.recurrent_shape)
    b       [G, N, D]        bias (config.bias_shape)
    states  [S, B, 1, N, D]  initial states, None for config.initial_val (config.output_shape)
    function  "lstm", "gru", "elman" or "slstm"; gates of lstm and slstm are i, f, z, o, of gru r, z, n
              in Wx, n, r, z in R, and n's recurrent part, r, z, n in b

    Returns the states of every step [S, B, T, N, D], h first, and the last ones [S, B, 1, N, D], in
    the dtype of Wx, or in config's where that casts the inputs of its CUDA backends. All are
    differentiable but slstm's m. slstm keeps n as it is, where flashrnn raises it to at least 1: that
    differs for initial states with 0 < n < 1 alone.

    Raises ValueError for an unknown function, backend, dtype or layout, for forward_clipval, which
    no kernel here has, and for sizes that do not fit; TypeError for what is no tensor.
    """
    if config is None:
        config = FlashRNNConfig(function=function, backend=backend, dtype=dtype)
        config.dtype_w = str(Wx.dtype).removeprefix("torch.") if torch.is_tensor(Wx) else None
    _check(config, {"Wx": Wx, "R": R, "b": b} | ({} if states is None else {"states": states}))
    x = _permute(Wx, config.input_shape, "BTGHD")
    io = x.dtype
    if config.enable_automatic_mixed_precision and not config.backend.startswith("vanilla"):
        io = DTYPES[getattr(config, "dtype_w", None) or config.dtype]
    weight = _permute(R, config.recurrent_shape, "GHDP")
    bias = _permute(b, config.bias_shape, "GHD")
    if config.function == "gru":
        weight, bias = weight[GRU_WEIGHT], bias[GRU_BIAS]
    kernel = load_kernel("fused-rnn", x.device.type)
    cell = CELLS[config.function]
    count = kernel.CELLS[cell].states
    if states is None:
        given = _initial(x, count, config.initial_val)
    else:
        given = _permute(states, config.output_shape, "SBTHD")[:, :, 0]
    options: dict[str, Any] = {"return_states": True}
    if config.gradient_recurrent_cut:
        options["grad_clip"] = 0.0
    elif config.gradient_recurrent_clipval is not None:
        options["grad_clip"] = config.gradient_recurrent_clipval
    _, last, every = kernel.recurrent(cell, x.to(io), weight, bias, tuple(given), **options)
    steps = torch.stack([s.to(io) for s in every])
    ends = torch.stack([s.to(io) for s in last])[:, :, None]
    return tuple(_permute(y, "SBTHD", config.output_shape) for y in (steps, ends))  # type: ignore


def _check(config: Any, tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, but must be a tensor")
    _check_choice("function", config.function, CELLS)
    _check_choice("backend", config.backend, BACKENDS)
    _check_choice("dtype", config.dtype, DTYPES)
    for name, layouts in LAYOUTS.items():
        _check_choice(name, getattr(config, name), layouts)
    for name, shape in zip(tensors, LAYOUTS, strict=False):
        letters = getattr(config, shape)
        if tensors[name].dim() != len(letters):
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, but must be {letters}")
    if config.forward_clipval is not None:
        raise ValueError(
            f"forward_clipval is {config.forward_clipval}, but must be None: no kernel clips h of "
            "every cell"
        )


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}")


def _permute(x: torch.Tensor, given: str, wanted: str) -> torch.Tensor:
    return x.permute([given.index(letter) for letter in wanted])


def _initial(x: torch.Tensor, count: int, value: Any) -> torch.Tensor:
    B, _, _, N, D = x.shape
    values = value if isinstance(value, (list, tuple)) else [value] * count
    return torch.stack([x.new_full((B, N, D), v, dtype=torch.float32) for v in values])
