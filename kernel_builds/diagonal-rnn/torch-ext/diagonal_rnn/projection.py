"""The input projection of a diagonal cell: the only place where channels mix."""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_floating, check_shape, check_tensor


def headwise_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """What a cell's gates see of the input, each of N heads of its own slice of it.

        y[..., g, n J + j] = sum over i of weight[n, g, j, i] x[..., n I + i]  +  bias[g, n J + j]

    x [..., N I], weight [N, G, J, I], bias [G, N J] or None -> y [..., G, N J], the layout that
    flash_gru and flash_lstm read. With one head it is F.linear; with more one batched product, and
    one copy that brings the heads together. dtypes as in torch.matmul; differentiable.
    """
    check_tensor("x", x)
    check_floating("x", x)
    check_tensor("weight", weight, x.device)
    if weight.dim() != 4 or x.dim() < 1 or x.shape[-1] != weight.shape[0] * weight.shape[3]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be [N, G, J, I] with N I = x.shape[-1]; "
            f"x has shape {list(x.shape)}"
        )
    N, G, J, I = weight.shape
    if bias is not None:
        check_tensor("bias", bias, x.device)
        check_shape("bias", bias, (G, N * J), "[G, N J]")
    if N == 1:
        flat = None if bias is None else bias.flatten()
        return F.linear(x, weight.view(G * J, I), flat).view(*x.shape[:-1], G, J)
    M = math.prod(x.shape[:-1])
    heads = x.reshape(M, N, I).transpose(0, 1)  # [N, M, I], no copy
    y = torch.bmm(heads, weight.view(N, G * J, I).transpose(1, 2))  # [N, M, G J]
    y = y.view(N, M, G, J).permute(1, 2, 0, 3).reshape(*x.shape[:-1], G, N * J)
    return y if bias is None else y + bias.to(y.dtype)
