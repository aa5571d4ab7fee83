"""Weights of 4 bits, in groups that share a scale."""

import torch
from torch import Tensor

GROUP = 32  # weights of a row that share a scale
MOST = 7  # the largest weight; the smallest is -8


def unpack_int4(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the matrix [N, K] of weights of 4 bits, uint8 [N, K / 2], and scales, bf16 [N, K / 32].

    A row is groups of 32 weights in 16 bytes: byte i of a group has weight i in its low four bits and
    weight 16 + i in its high four, both plus 8. A weight is multiplied by its group's scale and rounded
    once to `dtype`. ValueError names the argument.
    """
    half = GROUP // 2
    if scale.dim() != 2:
        raise ValueError(f"scale has shape {list(scale.shape)}, but must be [N, K / {GROUP}]")
    wanted = [scale.shape[0], scale.shape[1] * half]
    if list(weight.shape) != wanted:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be {wanted}, scale's [N, K / 2]"
        )
    # fp16 does not hold all scales
    wide = torch.float32 if dtype == torch.float16 else dtype
    groups = weight.reshape(*scale.shape, half)
    values = torch.empty(*scale.shape, GROUP, dtype=wide, device=weight.device)
    values[..., :half] = groups & 15
    values[..., half:] = groups >> 4
    return values.sub_(8).mul_(scale[..., None]).flatten(1).to(dtype)


def pack_int4(values: Tensor) -> Tensor:
    """Returns whole numbers from -8 to 7, [N, K / 32, 32], as the bytes [N, K / 2] of weights of 4 bits.

    ValueError names the argument."""
    if values.dim() != 3 or values.shape[2] != GROUP:
        raise ValueError(
            f"values have shape {list(values.shape)}, but must be [N, K / {GROUP}, {GROUP}]"
        )
    bits = values + 8
    if not bool(((bits >= 0) & (bits <= MOST + 8)).all()):
        raise ValueError(f"values are not all from -8 to {MOST}")
    low, high = bits.to(torch.uint8).chunk(2, -1)
    return (low | high << 4).flatten(1)
