"""The causal depthwise convolution that precedes a diagonal cell in its published block."""

from typing import Optional

import torch
from torch import Tensor

from .checks import (
    check_flag,
    check_floating,
    check_mask,
    check_operand,
    check_size,
    check_tensor,
)
from .conv_reference import convolve
from .dispatch import BACKEND, select_backend
from .formulas import CALLS, fall_back_for_derivatives
from .memory import check_memory
from .sequences import state_dtype

TAPS = 4  # the CUDA kernel's number of taps
# A limit, because an expanded weight can have any number of taps, and the reference loops over them.
MOST_TAPS = 2**16


def causal_conv(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, window: Optional[Tensor] = None,
    *, reset: Optional[Tensor] = None, silu: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns y_t[d] = bias[d] + sum over j < K of weight[d, K - 1 - j] x_(t - j)[d], or silu of
    that.

    x [B, T, D], weight [D, K], bias [D] or None, window [B, K - 1, D] the steps before the first
    (zeros if None) -> y [B, T, D] in x's dtype, bf16, fp16, fp32 or fp64. reset [B, T] bool: nothing
    before a marked step counts from it on. Sums are in fp32 (fp64 for fp64). `backend` is "auto",
    "cuda" (K = 4) or "reference", torch's own convolution. Differentiable. Wrong arguments
    raise TypeError or ValueError naming the argument, what it was and what it must be.
    """
    check_tensor("x", x)
    check_floating("x", x)
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [B, T, D]")
    check_size("x", x)
    check_tensor("weight", weight, x.device)
    check_floating("weight", weight)
    B, _, D = x.shape
    if weight.dim() != 2 or len(weight) != D or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {list(weight.shape)}, but must be [D, K], D = {D}")
    if weight.shape[1] > MOST_TAPS:
        raise ValueError(f"weight has {weight.shape[1]} taps, but must have at most {MOST_TAPS}")
    past = weight.shape[1] - 1
    if bias is not None:
        check_operand("bias", bias, (D,), "[D]", x.device)
    if window is not None:
        check_operand("window", window, (B, past, D), "[B, K - 1, D]", x.device)
    names = ("x", "weight", "bias", "window", "window")
    check_memory(names, x, weight, bias, window)
    check_mask("reset", reset, x)
    check_flag("silu", silu)
    if isinstance(backend, str) and backend == "cpu":
        raise ValueError("backend is 'cpu', but the convolution has 'auto', 'cuda' and 'reference'")
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    chosen = fall_back_for_derivatives(chosen, backend, x, weight, bias, window, stacklevel=3)
    if chosen == "cuda" and past + 1 == TAPS:
        dtype = state_dtype(x.dtype)
        last = weight.new_zeros(1, D) if bias is None else bias[None].to(weight.dtype)
        rows = torch.cat([weight.mT, last]).to(dtype)
        window = None if window is None else window.to(x.dtype)
        return CALLS["causal_conv_fwd"](x, rows, window, reset, silu)
    if backend == "cuda":
        raise ValueError(f"weight has {past + 1} taps, but backend 'cuda' must have {TAPS}")
    return convolve(x, weight, bias, window, reset, silu)
