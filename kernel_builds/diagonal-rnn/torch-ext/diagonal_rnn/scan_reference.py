"""Scans that are parallel in time, in torch: O(T) work in O(log T) launches on any device.

`linear_scan` and `block_scan` compute what functional.py's functions of these names do, by
pairs: two neighbouring steps are composed to one affine map, the half as many maps are scanned,
and the steps in between are filled in. (reference.scan is the same as a loop with T launches,
against which this is tested.) `scan` takes any kind of matrix, given how two of them are
multiplied and how one is applied.
"""

from typing import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def scan(a: Tensor, b: Tensor, compose: Product, apply: Product, reverse: bool = False) -> Tensor:
    """Computes h_t = apply(a_t, h_{t-1}) + b_t from h_{-1} = 0; a [B, T, ...], b [B, T, ...] -> h
    as b.

    compose(later, earlier) is the matrix of two steps. a_0 (with `reverse` a_{T-1}) meets nothing and
    may be anything. Differentiable by autograd.
    """
    if reverse:
        return _scan(a.flip(1), b.flip(1), compose, apply).flip(1)
    return _scan(a, b, compose, apply)


def _scan(a: Tensor, b: Tensor, compose: Product, apply: Product) -> Tensor:
    pairs = b.shape[1] // 2
    if pairs == 0:
        return b
    first_a, second_a, first_b = a[:, 0::2], a[:, 1::2], b[:, 0::2]
    second = _scan(
        compose(second_a, first_a[:, :pairs]),
        apply(second_a, first_b[:, :pairs]) + b[:, 1::2],
        compose,
        apply,
    )
    between = first_a.shape[1] - 1  # number of first steps that have a step before them
    filled = apply(first_a[:, 1:], second[:, :between]) + first_b[:, 1:]
    first = torch.cat([first_b[:, :1], filled], 1)
    h = torch.stack([first[:, :pairs], second], 2).flatten(1, 2)
    return torch.cat([h, first[:, pairs:]], 1)


def multiply_vector(a: Tensor, v: Tensor) -> Tensor:
    """Multiplies a [..., n, n] with v [..., n]."""
    return (a @ v.unsqueeze(-1)).squeeze(-1)


def linear_scan(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """Scans a and b [B, T, ...], elementwise."""
    return scan(a, b, torch.mul, torch.mul, reverse)


def block_scan(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """Scans a [B, T, ..., n, n] and b [B, T, ..., n], for any n."""
    return scan(a, b, torch.matmul, multiply_vector, reverse)
