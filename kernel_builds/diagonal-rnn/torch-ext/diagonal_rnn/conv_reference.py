"""The causal depthwise convolution in torch, differentiable by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .sequences import state_dtype


def convolve(x, weight, bias, window, reset, silu) -> Tensor:
    # x [B, T, D], weight [D, K], bias [D], window [B, K - 1, D], reset [B, T]
    exact, past = state_dtype(x.dtype), weight.shape[1] - 1
    window = x.new_zeros(x.shape[0], past, x.shape[2]) if window is None else window.to(x.dtype)
    seen = torch.cat([window, x], 1)
    document = None if reset is None else F.pad(reset.long(), (past, 0)).cumsum(1)
    taps, T = weight.to(exact), x.shape[1]
    y = x * taps[:, past]
    for j in range(1, past + 1):
        lag = seen[:, past - j : past - j + T]
        if document is not None:
            same = document[:, past - j : past - j + T] == document[:, past:]
            lag = torch.where(same[..., None], lag, 0.0)
        y = y + lag * taps[:, past - j]
    y = y if bias is None else y + bias.to(exact)
    return (F.silu(y) if silu else y).to(x.dtype)
