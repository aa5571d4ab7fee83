"""A linear layer with a weight of 8 or 4 bits, and when a decoding step reads it directly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..hub.kernel_loader import load_kernel
from ..kernels.tfla.int4 import GROUP, pack_int4, unpack_int4

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Up to which linear_step is used on a GPU (NOTEBOOK.md, "Weights of 8 and 4 bits"): it reads a weight
# once for 16 rows. The module reads the weight, writes it in 16 bits, and reads it again.
ROWS, ROWS_OF_INT4 = 64, 128
INT4 = torch.uint8  # of weights of 4 bits, two in a byte
INPUTS_OF_INT4 = 64  # those of a layer are a multiple: on a GPU two scales are read at once
FACTORS = 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7  # of the scale that reaches the largest weight


class QuantizedLinear(nn.Linear):
    """nn.Linear with a weight of 8 bits [N, K] and a scale [N] in fp32, or of 4 bits, uint8 [N, K / 2],
    and bf16 [N, K / 32] (unpack_int4), which have no gradients.

    x [..., K] -> x W^T + bias [..., N], where W is scale[:, None] weight, or unpack_int4(weight, scale);
    gradients pass to x. `.to(dtype)`, `.half()` and the like leave weight and scale as they are, and
    cast the bias. On a GPU few rows of x are multiplied by tfla's `linear_step`, as in a decoding step,
    unless config.backend is "reference".
    """

    config: Any = None  # of the model that it is part of

    def __init__(
        self, inputs: int, outputs: int, kept: torch.dtype, bias: bool = False, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        nn.Module.__init__(self)  # nn.Linear's would make a floating weight
        self._is_hf_initialized = True  # transformers draws no weights for it
        if kept == INT4 and inputs % INPUTS_OF_INT4:
            raise ValueError(
                f"inputs are {inputs}, but must be a multiple of {INPUTS_OF_INT4} for int4"
            )
        self.in_features, self.out_features = inputs, outputs
        empty = lambda *shape, dtype: nn.Parameter(
            torch.empty(shape, dtype=dtype, device=device), requires_grad=False
        )
        if kept == INT4:
            self.weight = empty(outputs, inputs // 2, dtype=kept)
            self.scale = empty(outputs, inputs // GROUP, dtype=torch.bfloat16)
        else:
            self.weight = empty(outputs, inputs, dtype=kept)
            self.scale = empty(outputs, dtype=torch.float32)
        self.register_parameter("bias", empty(outputs, dtype=dtype) if bias else None)

    @classmethod
    def like(cls, module: nn.Linear, kept: torch.dtype) -> "QuantizedLinear":
        """Returns a layer of the module's sizes, with empty weights."""
        w, has_bias = module.weight, module.bias is not None
        made = cls(module.in_features, module.out_features, kept, has_bias, w.device, w.dtype)
        return made.train(module.training)

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Linear, kept: torch.dtype) -> "QuantizedLinear":
        """Returns a layer that computes nearly what `module` does."""
        made = cls.like(module, kept)
        made.weight.data, made.scale.data = quantize(module.weight, kept)
        if module.bias is not None:
            made.bias.data = module.bias.data
        return made

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:  # [N, K]
        if self.weight.dtype == INT4:
            return unpack_int4(self.weight, self.scale, dtype)
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The weight, by the name by which peft knows layers that have `dequantize`, for its DoRA."""
        return self.weight

    def dequantize(self) -> torch.Tensor:  # [N, K]
        """Returns the weight in fp32."""
        return self.dequantized(torch.float32)

    def floating(self, dtype: torch.dtype) -> nn.Linear:
        """Returns a layer that computes the same, with a weight in `dtype`."""
        has_bias = self.bias is not None
        made = nn.Linear(self.in_features, self.out_features, has_bias, "meta", dtype)
        made.weight = nn.Parameter(self.dequantized(dtype))
        made.bias = nn.Parameter(self.bias.to(dtype)) if self.bias is not None else None
        return made.train(self.training)

    @torch.no_grad()
    def resized_like(self, module: nn.Linear) -> "QuantizedLinear":
        """Returns `module` quantised as this layer is; rows that both have are copied from this layer."""
        made = self.of(module, self.weight.dtype)
        kept = min(self.out_features, module.out_features)
        made.weight.data[:kept], made.scale.data[:kept] = self.weight[:kept], self.scale[:kept]
        made.config = self.config
        return made

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether kernels take its weight, scale and bias with x of this dtype: other tools cast
        parameters."""
        packed = self.weight.dtype == INT4
        bias = self.bias is None or self.bias.dtype == dtype
        return bias and self.scale.dtype == (torch.bfloat16 if packed else torch.float32)

    def kernel_for(self, x: torch.Tensor) -> Any:
        """Returns the kernel that multiplies x [..., K], which has few rows, or None."""
        records = torch.is_grad_enabled() and x.requires_grad
        if not x.is_cuda or records or torch.compiler.is_compiling():
            return None
        if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[-1] != self.in_features:
            return None
        rows, most = x[..., 0].numel(), ROWS_OF_INT4 if self.weight.dtype == INT4 else ROWS
        backend = getattr(self.config, "backend", "auto")
        if not 0 < rows <= most or backend == "reference" or not self.fits(x.dtype):
            return None
        if why_not_readable(self.weight) is not None:
            return None
        kernel = load_kernel("tfla", "cuda", backend)
        return kernel if kernel.BACKEND == "cuda" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K] -> [..., N]
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        if (kernel := self.kernel_for(x)) is not None:
            rows = x.reshape(-1, self.in_features).contiguous()
            biases = [] if self.bias is None else [self.bias]
            y = kernel.linear_step(rows, [self.weight], biases, scales=[self.scale])[0]
            return y.view(*x.shape[:-1], -1)
        # fp16 ends at 65,504, which x q may pass long before x W^T does
        if self.weight.dtype == INT4 or x.dtype == torch.float16:
            y = linear(x, self.dequantized(x.dtype))
        else:
            y = (linear(x, self.weight.to(x.dtype)) * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves weight and scale as bytes, which no cast changes."""
        as_bytes = lambda t: fn(t.view(torch.uint8)).view(t.dtype)
        return super()._apply(lambda t: fn(t) if t is self.bias else as_bytes(t), recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuses a weight of another dtype, whose values would be cut to whole numbers."""
        given = state_dict.get(f"{prefix}weight")
        if isinstance(given, torch.Tensor) and given.dtype != self.weight.dtype:
            errors = rest[-1]
            errors.append(f"{prefix}weight is {given.dtype}, but must be {self.weight.dtype}")
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight [N, K] in 8 or 4 bits, and its scales.

    ValueError if a value is not finite."""
    wide = weight.detach().float()
    most = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    if not most.isfinite().all():
        raise ValueError("weight has values that are not finite, but needs finite ones")
    if dtype == INT4:
        return quantize_int4(wide)
    # a row below this could not be divided by its scale
    scale = (most / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    quotient = wide / scale[:, None]
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype), scale


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a finite weight [N, K] in 4 bits, and the scales of its groups.

    Two scales are tried with each of FACTORS: by one, -8 stands for the group's largest value, by
    the other 7 or -7. The scale with the least squared error, relative to that value, is kept."""
    groups = weight.reshape(len(weight), weight.shape[1] // GROUP, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, kept = torch.zeros_like(groups), torch.ones_like(largest)  # a scale of 1 for zeros
    least = (groups / largest).square().sum(-1, keepdim=True)
    for factor in FACTORS:
        for reached in (-largest / 8, largest.abs() / 7):
            scale = (factor * reached).bfloat16().float()
            values = (groups / scale).round().clamp(-8, 7)
            error = ((values * scale - groups) / largest).square().sum(-1, keepdim=True)
            better = error < least  # never where a division by 0 has made it NaN
            best, kept = torch.where(better, values, best), torch.where(better, scale, kept)
            least = torch.where(better, error, least)
    return pack_int4(best), kept[..., 0].bfloat16()


def why_not_quantized(x: torch.Tensor, modules: Sequence[nn.Module]) -> str | None:
    """Returns why tfla's `linear_step` does not take x [B, 1, H] and the modules' quantised weights, or
    None, also if there are none."""
    dtypes = {m.weight.dtype for m in modules if isinstance(m, QuantizedLinear)}
    if not dtypes:
        return None
    if len(dtypes) > 1 or any(type(m) is nn.Linear for m in modules):
        return "some linear layers are quantised in another way than others"
    if not x.is_cuda:
        return "8-bit floats have no kernel on a CPU" if torch.float8_e4m3fn in dtypes else None
    most = ROWS_OF_INT4 if INT4 in dtypes else ROWS
    return f"more than {most} rows with quantised weights" if x.shape[0] > most else None


def why_not_readable(weight: torch.Tensor) -> str | None:
    """Returns why the kernel cannot read the weight's rows as vectors, or None."""
    packed, eight = weight.dtype == INT4, weight.is_cuda and weight.element_size() == 1
    values = INPUTS_OF_INT4 if packed else 16 if eight else 8
    inputs = weight.shape[1] * (2 if packed else 1)
    if inputs % values:
        return f"has rows of {inputs} values, which are no multiple of {values}"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "is not contiguous, or does not begin at 16 bytes"
    return None
