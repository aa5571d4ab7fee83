"""Validates the arguments of `solve`, and evaluates a user's cell, its residuals and Jacobians."""

import math
import sys
from typing import Any, Tuple, Union

import torch
from torch import Tensor

from .checks import check_floating, check_shape, check_size, check_tensor
from .dispatch import shown
from .memory import check_memory
from .sequences import state_dtype
from .structures import Structure

Inputs = Union[Tensor, Tuple[Tensor, ...]]


def check_x(x: Inputs):
    """Returns x as a tuple, and the state's dtype."""
    xs = x if isinstance(x, tuple) else (x,)
    if not xs:
        raise ValueError("x is an empty tuple, but must have at least one tensor")
    for k, v in enumerate(xs):
        name = f"x[{k}]" if isinstance(x, tuple) else "x"
        check_tensor(name, v, xs[0].device if k else None)
        if v.dim() < 2 or v.shape[:2] != xs[0].shape[:2]:
            raise ValueError(f"{name} has shape {list(v.shape)}, but must be [B, T, ...]")
        check_size(name, v)
        check_memory((name, name), v)
        if v.is_floating_point():
            check_floating(name, v)
    floating = next((v.dtype for v in xs if v.is_floating_point()), torch.float32)
    return xs, state_dtype(floating)


def check_state(x: Tensor, h0, state_shape, dtype: torch.dtype) -> Tensor:
    """Returns h0 [B, *S] in the state's dtype."""
    if h0 is None:
        if state_shape is None:
            raise ValueError("h0 and state_shape are both None, but one must say what a state is")
        return torch.zeros(x.shape[0], *check_sizes(state_shape), dtype=dtype, device=x.device)
    check_tensor("h0", h0, x.device)
    check_floating("h0", h0)
    check_memory(("h0", "h0"), h0)
    shape = h0.shape[1:] if state_shape is None else check_sizes(state_shape)
    check_shape("h0", h0, (x.shape[0], *shape), "[B, *S]")
    if h0.dim() < 2:
        raise ValueError(f"h0 has shape {list(h0.shape)}, but must be [B, *S], S not empty")
    return h0.to(dtype)


def check_sizes(state_shape: Any) -> Tuple[int, ...]:
    whole = isinstance(state_shape, (tuple, list)) and all(type(n) is int for n in state_shape)
    if not whole or not state_shape or not all(0 <= n < 2**31 for n in state_shape):
        had = shown(state_shape)
        raise ValueError(
            f"state_shape is {had}, but must be a tuple of ints, not empty, none below 0"
        )
    return tuple(state_shape)


def check_params(params: Any, x: Tensor) -> None:
    if not isinstance(params, (tuple, list)):
        raise TypeError(f"params is a {type(params).__name__}, but must be a tuple")
    for k, v in enumerate(params):
        if isinstance(v, Tensor):
            name = f"params[{k}]"
            check_tensor(name, v, x.device)
            check_size(name, v)
            check_memory((name, name), v)


def check_bounds(bounds: Any, h0: Tensor) -> Any:
    """Returns (low, high) in the state's dtype."""
    if bounds is None:
        return None
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(f"bounds is {shown(bounds)}, but must be None or (low, high)")
    low, high = (_bound(f"bounds[{k}]", v, h0) for k, v in enumerate(bounds))
    if bool((low > high).any()):
        raise ValueError("bounds has a low above its high")
    return low, high


def with_own_gradient(v: Tensor) -> Tensor:
    """Returns v with a gradient in memory of its own. If a cell adds its arguments, torch gives all
    of them one gradient, and the gradients of h0, x and params would then be views of the same
    memory."""
    return v.neg().neg() if v.requires_grad else v


def _bound(name: str, value: Any, h0: Tensor) -> Tensor:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and (abs(value) <= sys.float_info.max or abs(value) == math.inf):
        return torch.as_tensor(float(value), dtype=h0.dtype, device=h0.device)
    if number:
        raise ValueError(f"{name} is {shown(value)}, but must be a number or a tensor")
    check_tensor(name, value, h0.device)
    check_floating(name, value)
    check_memory((name, name), value)
    try:
        torch.broadcast_shapes(value.shape, h0.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but must be one that broadcasts to h0's, "
            f"{list(h0.shape)}"
        ) from None
    return value.to(h0.dtype)


class Problem:
    """The cell applied to rows, for x and params in any form, with everything in the state's dtype."""

    def __init__(self, cell: Any, h0: Tensor, xs, params, single: bool, jacobian_fn: Any):
        real = lambda v: isinstance(v, Tensor) and v.is_floating_point()
        cast = lambda v: with_own_gradient(v.to(h0.dtype)) if real(v) else v
        self.cell, self.h0, self.jacobian_fn = cell, with_own_gradient(h0), jacobian_fn
        self.xs, self.params = tuple(map(cast, xs)), tuple(map(cast, params))
        self.single = single

    def arguments(self, h, xs):
        return (h, xs[0] if self.single else xs, *self.params)

    def step(self, h: Tensor, xs: Tuple[Tensor, ...]) -> Tensor:
        """Computes one step: [N, *S] -> [N, *S]."""
        after = self.cell(*self.arguments(h, xs))
        check_tensor("cell(...)", after, h.device)
        check_shape("cell(...)", after, tuple(h.shape), "[N, *S]")
        if after.dtype != h.dtype:
            raise TypeError(f"cell(...) has dtype {after.dtype}, but must be {h.dtype} as h is")
        return after

    def linearize(self, structure: Structure, h: Tensor, xs: Tuple[Tensor, ...], step=None):
        """Returns f at rows h, and J there; `step` replaces the cell, for example by many steps of
        it."""
        after, pulled = torch.func.vjp(lambda s: (step or self.step)(s, xs), h)[:2]
        pull = lambda v: pulled(v)[0]
        if self.jacobian_fn is None or step is not None:
            return after, structure.jacobian(pull, h), pull
        jacobian = self.jacobian_fn(*self.arguments(h, xs))
        check_tensor("jacobian_fn(...)", jacobian, h.device)
        wanted = tuple(structure.jacobian(torch.zeros_like, h[:1]).shape[1:])
        check_shape("jacobian_fn(...)", jacobian, (len(h), *wanted), f"{structure.name} J")
        return after, jacobian, pull
