"""A linear layer with a weight of 8 bits, and when decoding reads it as it is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Up to which linear_step is used on a GPU: it reads a weight once for 16 rows, where the module reads
# it, writes it in 16 bits, and reads that.
ROWS = 64


class QuantizedLinear(nn.Linear):
    """nn.Linear with a weight of 8 bits [N, K] and a scale [N] in fp32, which have no gradients.

    x [..., K] -> (x weight^T) scale + bias [..., N]; gradients pass to x. `.to(dtype)`, `.half()`
    and the like leave weight and scale as they are, and cast the bias.
    """

    dtypes = torch.int8, torch.float8_e4m3fn, torch.float32  # of weights, and of scales

    def __init__(
        self, inputs: int, outputs: int, eight: torch.dtype, bias: bool = False, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        nn.Module.__init__(self)  # nn.Linear's would make a floating weight
        self.in_features, self.out_features = inputs, outputs
        empty = lambda *shape, dtype: nn.Parameter(
            torch.empty(shape, dtype=dtype, device=device), requires_grad=False
        )
        self.weight = empty(outputs, inputs, dtype=eight)
        self.scale = empty(outputs, dtype=torch.float32)
        self.register_parameter("bias", empty(outputs, dtype=dtype) if bias else None)

    @classmethod
    def like(cls, module: nn.Linear, eight: torch.dtype) -> "QuantizedLinear":
        """Returns a layer of the module's sizes, with empty weights."""
        w, has_bias = module.weight, module.bias is not None
        made = cls(module.in_features, module.out_features, eight, has_bias, w.device, w.dtype)
        return made.train(module.training)

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Linear, eight: torch.dtype) -> "QuantizedLinear":
        """Returns a layer that computes nearly what `module` does."""
        made = cls.like(module, eight)
        made.weight.data, made.scale.data = quantize(module.weight, eight)
        if module.bias is not None:
            made.bias.data = module.bias.data
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K] -> [..., N]
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        y = (linear(x, self.weight.to(x.dtype)) * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves weight and scale as bytes, which no cast changes."""
        as_bytes = lambda t: fn(t.view(torch.uint8)).view(t.dtype)
        return super()._apply(lambda t: fn(t) if t is self.bias else as_bytes(t), recurse)


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight [N, K] in 8 bits, and the scales [N] of its rows in fp32.

    ValueError if a value is not finite."""
    wide = weight.detach().float()
    most = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    if not most.isfinite().all():
        raise ValueError("weight has values that are not finite, but needs finite ones for 8 bits")
    # a row below this could not be divided by its scale
    scale = (most / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    quotient = wide / scale[:, None]
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype), scale


def why_not_eight_bits(x: torch.Tensor, modules: Sequence[nn.Module]) -> str | None:
    """Returns why tfla's `linear_step` does not take x [B, 1, H] and the modules' weights of 8 bits, or
    None, also if there are none."""
    dtypes = {m.weight.dtype for m in modules if isinstance(m, QuantizedLinear)}
    if not dtypes:
        return None
    if len(dtypes) > 1 or any(type(m) is nn.Linear for m in modules):
        return "some linear layers have weights of 8 bits, and others have not"
    if not x.is_cuda:
        return "8-bit floats have no kernel on a CPU" if torch.int8 not in dtypes else None
    return f"more than {ROWS} rows with weights of 8 bits" if x.shape[0] > ROWS else None


def is_readable(weight: torch.Tensor) -> bool:
    """Whether the kernel can read the weight's rows as vectors of 8 values, on a GPU of 16 bytes."""
    values = 16 if weight.is_cuda and weight.element_size() == 1 else 8
    return weight.is_contiguous() and weight.shape[1] % values == 0 and weight.data_ptr() % 16 == 0
