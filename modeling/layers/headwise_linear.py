"""A block-diagonal linear projection."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.diagonal_rnn.projection import (  # pure torch, for every backend
    headwise_linear,
    headwise_product,
)


class HeadwiseLinear(nn.Module):
    """A linear layer with one block per head (a block-diagonal matrix), for G gates at once:

    y[..., g, n J + j] = sum over i of weight[n, g, j, i] x[..., n I + i] + bias.

    weight [N, G, J, I] with N I = input_size, N J = hidden_size; bias [G, hidden_size]. x in any floating
    dtype torch.matmul takes, [..., input_size] -> y [..., G, hidden_size], or with `apart` what a
    diagonal cell reads without a copy: the product [N, ..., G, J], and the bias beside it, fp32 (fp64).
    Kaiming-uniform weight, zero bias.

    Tools that look for nn.Linear do not see it. LoRA on "all-linear" adds nothing to it: name it in
    PEFT's `modules_to_save` to train it whole. Quantisation (bitsandbytes, torchao) leaves it in
    the model's dtype; it has 1 / N of a dense projection's weights.
    """

    def __init__(
        self, input_size: int, hidden_size: int, gates: int, num_heads: int = 1, bias: bool = True,
        device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if num_heads < 1 or size < 1 or size % num_heads:
                raise ValueError(
                    f"{name} is {size}, but must be a multiple of num_heads = {num_heads}"
                )
        self.input_size, self.hidden_size = input_size, hidden_size
        self.gates, self.num_heads = gates, num_heads
        widths = hidden_size // num_heads, input_size // num_heads
        self.weight = nn.Parameter(
            torch.empty(num_heads, gates, *widths, device=device, dtype=dtype)
        )
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(gates, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6 / self.weight.shape[-1])  # He et al. 2015, fan-in of one head
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, apart: bool = False) -> Any:
        if apart:  # through the module's call, for whoever moves its parameters around it
            return headwise_product(x, self.weight), self._kept_bias()
        return headwise_linear(x, self.weight, self.bias)

    def _kept_bias(self) -> Tensor | None:
        """Returns a copy of the bias in the dtype that cells add it in.

        FSDP around this module frees the parameter's own memory when the call ends."""
        if self.bias is None:
            return None
        return self.bias.to(torch.promote_types(self.bias.dtype, torch.float32), copy=True)

    def extra_repr(self) -> str:
        sizes = f"{self.input_size}, {self.hidden_size}, gates={self.gates}"
        return f"{sizes}, num_heads={self.num_heads}, bias={self.bias is not None}"
