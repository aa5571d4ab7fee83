"""The input projection of a diagonal cell, the only place where channels mix."""

import math
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_input, check_operand, check_tensor
from .formulas import is_transformed
from .memory import check_memory
from .private_names import is_batched


def headwise_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Projects the input of a diagonal cell's gates; each of N heads reads its own slice of it.

        y[..., g, n J + j] = sum over i of weight[n, g, j, i] x[..., n I + i]  +  bias[g, n J + j]

    x [..., N I], weight [N, G, J, I], bias [G, N J] or None -> y [..., G, N J], the layout that
    flash_gru and flash_lstm read. With one head it is F.linear; with more one batched product, and
    one copy that brings the heads together. dtypes as in torch.matmul; differentiable.
    """
    N, G, J, I = _check(x, weight)
    if bias is not None:
        check_operand("bias", bias, (G, N * J), "[G, N J]", x.device)
        check_memory(("bias", "bias"), bias)
    if N == 1:
        flat = None if bias is None else bias.flatten().to(x.dtype)
        return F.linear(x, weight.reshape(G * J, I), flat).view(*x.shape[:-1], G, J)
    M = math.prod(x.shape[:-1])
    heads = x.reshape(M, N, I).transpose(0, 1)  # [N, M, I], no copy
    y = torch.bmm(heads, weight.reshape(N, G * J, I).transpose(1, 2))  # [N, M, G J]
    y = y.view(N, M, G, J).permute(1, 2, 0, 3).reshape(*x.shape[:-1], G, N * J)
    return y if bias is None else y + bias.to(y.dtype)


def headwise_product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `headwise_linear` without a bias and with its heads outermost: y [N, ..., G, J].

    flash_gru and flash_lstm read that layout too. It is the batched product alone: x and the
    gradient of y are read in place, and the gradients of x and weight are written in place.
    """
    _check(x, weight)
    return multiply_heads(x, weight)


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Runs `headwise_product` on arguments that have been checked."""
    N, G, J, I = weight.shape
    device = x.device.type
    # Does what autocast does for torch.bmm: fp64 stays as it is, and meta tensors are not
    # supported.
    if x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), N, I)
    given = rows, weight.reshape(N, G * J, I)
    # Products into views cannot be traced; the compiler chooses its own layouts.
    traced = torch.compiler.is_compiling() or is_transformed()
    product = _multiply if traced else _HeadwiseProduct.apply
    return product(*given).view(N, *x.shape[:-1], G, J)


def _multiply(rows: Tensor, weight: Tensor) -> Tensor:  # [M, N, I], [N, K, I] -> [N, M, K]
    return torch.bmm(rows.transpose(0, 1), weight.transpose(1, 2))


class _HeadwiseProduct(torch.autograd.Function):
    """Differentiates _multiply, with gradients in the layouts of rows and weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight)
        return _multiply(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor]]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        drows = dweight = None
        if ctx.needs_input_grad[0]:
            # A product written into a view cannot be differentiated again, and dy cannot be a batch.
            if torch.is_grad_enabled() or is_batched(dy):
                drows = torch.bmm(dy, weight).transpose(0, 1)
            else:
                drows = rows.new_empty(rows.shape)
                torch.bmm(dy, weight, out=drows.transpose(0, 1))
        if ctx.needs_input_grad[1]:
            dweight = torch.bmm(dy.transpose(1, 2), rows.transpose(0, 1))
        return drows, dweight


def _check(x: Tensor, weight: Tensor) -> Tuple[int, int, int, int]:
    """Checks the arguments, and returns N, G, J, I."""
    check_input("x", x)
    check_input("weight", weight)
    check_tensor("weight", weight, x.device)
    if weight.dim() != 4 or x.dim() < 1 or x.shape[-1] != weight.shape[0] * weight.shape[3]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be [N, G, J, I] with N I = x.shape[-1]; "
            f"x has shape {list(x.shape)}"
        )
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"weight has dtype {weight.dtype}, but must be {x.dtype}, x's")
    check_memory(("x", "weight", "weight"), x, weight)
    N, G, J, I = weight.shape
    return N, G, J, I
