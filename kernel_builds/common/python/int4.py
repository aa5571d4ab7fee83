"""Weights of 4 bits, in groups that share a scale."""

import torch
from torch import Tensor

GROUP = 32  # weights of a row that share a scale


def unpack_int4(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns the matrix [N, K] in fp32 of weights of 4 bits, uint8 [N, K / 2], and scales [N, K / 32].

    A row is groups of 32 weights in 16 bytes: byte i of a group has weight i in its low four bits and
    weight 16 + i in its high four, both plus 8. A weight is multiplied by its group's scale.
    """
    groups = weight.reshape(*scale.shape, GROUP // 2)
    values = torch.cat([groups & 15, groups >> 4], -1).float() - 8
    return (values * scale.float()[:, :, None]).flatten(1)


def pack_int4(values: Tensor) -> Tensor:
    """Returns integers from -8 to 7, [N, K / 32, 32], as the bytes [N, K / 2] of weights of 4 bits."""
    low, high = (values + 8).to(torch.uint8).chunk(2, -1)
    return (low | high << 4).flatten(1)
