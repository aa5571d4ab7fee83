"""sLSTM and LSTM cells of other packages, with their recurrence on the fused-rnn kernel.

Each class below is mixed into the other package's class in front of it, so that it overrides the method that
runs the recurrence and nothing else: Parameters, state dict, configuration and layouts stay.
Shapes: B batch, T time, G gates, N heads, D head width, H = N D, K states.
"""

import math
from typing import Any

import torch

from ..hub.kernel_loader import load_kernel

CELLS = ("slstm", "lstm")
PARAMETERS = ("_recurrent_kernel_", "_bias_")  # the names that checkpoints of both packages have


def split(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Splits the last dimension of an input or a state [., ., sizes' product] into `sizes`."""
    if x.dim() != 3 or x.shape[-1] != math.prod(sizes):
        wanted = " ".join(map(str, sizes))
        raise ValueError(
            f"an input or a state has shape {list(x.shape)}, but must have 3 dimensions, the last of "
            f"{math.prod(sizes)} ({wanted})"
        )
    return x.unflatten(-1, sizes)


def inputs_first(
    weight: torch.Tensor, bias: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weight [N, D in, G D out] and bias [N G D] as [G, N, D out, D in] and [G, N, D]."""
    N, G, D = sizes
    return weight.view(N, D, G, D).permute(2, 0, 3, 1), bias.view(N, G, D).transpose(0, 1)


def missing_parameter(cell: torch.nn.Module) -> str | None:
    known = dict(cell.named_parameters())
    return next((f"it has no parameter {n}" for n in PARAMETERS if n not in known), None)


class RunsOnKernel:
    """Holds the backend's name, and calls the kernel."""

    kernel_backend: str

    def run_cell(
        self,
        cell: str,
        x: torch.Tensor,  # [B, T, G, N, D]
        weight: torch.Tensor,  # [G, N, D, D]
        bias: torch.Tensor,  # [G, N, D]
        state: torch.Tensor | None,  # [K, B, N, D]
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [B, T, N, D], [K, B, N, D]
        kernel = load_kernel("fused-rnn", x.device.type, self.kernel_backend)
        given = None if state is None else tuple(state.unbind(0))
        options["backend"] = self.kernel_backend
        if x.shape[1] == 1 and len(options) == 1:
            h, last = kernel.recurrent_step(cell, x[:, 0], weight, bias, given, **options)
            h = h[:, None]
        else:
            h, last = kernel.recurrent(cell, x, weight, bias, given, **options)
        return h, torch.stack(last)


class XlstmCell(RunsOnKernel):
    """sLSTMCell of xlstm, whose backend is "vanilla" or "cuda", and whose function "slstm" or "lstm".

    The "cuda" backend computes in the configuration's dtype, by default bfloat16, as in xlstm.
    """

    def forward(self: Any, input: torch.Tensor, state: Any = None, lengths: Any = None) -> Any:
        config = self.config
        G, N, D = config.num_gates, config.num_heads, config.head_dim
        x = split(input, (G, N, D))
        x = x if config.input_shape == "BSGNH" else x.transpose(0, 1)
        mixed = config.backend == "cuda" and config.enable_automatic_mixed_precision
        dtype = config.torch_dtype_w if mixed else x.dtype
        weight, bias = (self.get_parameter(name) for name in PARAMETERS)
        if config.backend == "cuda":
            weight, bias = inputs_first(weight, bias, (N, G, D))
        else:
            weight, bias = weight.view(N, G, D, D).transpose(0, 1), bias.view(G, N, D)
        options = {}
        if config.backend == "cuda" and config.gradient_recurrent_cut:  # "vanilla" ignores it
            options["grad_clip"] = 0.0
        h, last = self.run_cell(
            config.function, x.to(dtype), weight, bias,
            None if state is None else split(state, (N, D)), **options,
        )  # fmt: skip
        if config.output_shape == "BNSH":
            output = h.transpose(1, 2)
        else:
            output = h if config.output_shape == "BSH" else h.transpose(0, 1)
            output = output if config.output_shape == "SBNH" else output.flatten(2)
        last = last.flatten(2)
        if torch.is_autocast_enabled():
            return output, last.to(dtype)
        return output.to(input.dtype), last.to(input.dtype)

    @staticmethod
    def refusal(cell: Any) -> str | None:
        """Returns why the cell stays as it is, or None."""
        if missing := missing_parameter(cell):
            return missing
        if cell.config.function not in CELLS:
            return f"its function is {cell.config.function!r}, not one of {', '.join(CELLS)}"
        if cell.config.forward_clipval is not None:
            return (
                f"it clips the states that leave it (forward_clipval {cell.config.forward_clipval})"
            )
        if cell.config.backend == "cuda" and cell.config.gradient_recurrent_clipval is not None:
            return "its CUDA code clips h, too, by gradient_recurrent_clipval"
        return None


class TirexCell(RunsOnKernel):
    """sLSTMCell of tirex-ts, which computes in bfloat16 whatever the model's dtype, as does this."""

    def forward(self: Any, input: torch.Tensor, state: Any) -> Any:
        config = self.config
        N, G, D = config.num_heads, config.num_gates, config.head_dim
        x = split(input, (G, N, D)).to(torch.bfloat16)
        weight, bias = (self.get_parameter(name) for name in PARAMETERS)
        weight, bias = inputs_first(weight, bias, (N, G, D))
        state = None if state is None else split(state, (N, D))
        h, last = self.run_cell("slstm", x, weight, bias.float(), state)
        return h.transpose(1, 2).to(input.dtype), last.flatten(2).to(input.dtype)

    @staticmethod
    def refusal(cell: Any) -> str | None:
        return missing_parameter(cell)


class Tirex2Layer(RunsOnKernel):
    """The sLSTM layer of tirex-2, which calls the package flashrnn for its recurrence."""

    def slstm_flashrnn(
        self: Any,
        Wx: torch.Tensor,  # [B, T, G, N, D]
        R: torch.Tensor,  # [N, D in, G, D out]
        b: torch.Tensor,  # [N, G, D]
        config: Any,
        states: torch.Tensor | None = None,  # [K, B, 1, N, D]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h alone of the states of every step, [1, B, T, N, D]: all that the layer reads."""
        state = None if states is None else states[:, :, 0]
        weight, bias = R.permute(2, 0, 3, 1), b.transpose(0, 1)
        h, last = self.run_cell("slstm", Wx, weight, bias, state)
        return h[None], last[:, :, None].to(Wx.dtype)

    @staticmethod
    def refusal(layer: Any) -> str | None:
        return None
