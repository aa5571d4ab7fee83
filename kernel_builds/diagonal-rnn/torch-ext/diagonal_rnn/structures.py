"""Structures of a cell's Jacobian, and the operations of the solver on each kind.

A structure is data: how the Jacobian J of many rows is computed from the cell, J v, the product
of two, and the transpose. Everything else (Newton's linear solve, the adjoint) follows from
these by a scan. `register_structure` adds one under a name that `solve(structure=name)` then
takes.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from . import scan_reference
from .arguments import WIDEST_BLOCK
from .dispatch import BACKEND, select_backend
from .scan_reference import multiply_vector
from .scans import block_scan, linear_scan

Pull = Callable[[Tensor], Tensor]  # v [N, *S] -> v^T J [N, *S], from torch.func.vjp


class Structure(NamedTuple):
    """A form of Jacobians, such as diagonal, and its operations.

    The Jacobians of N rows with states [*S] are one tensor [N, ...]; leading dimensions broadcast."""

    name: str
    jacobian: Callable[[Pull, Tensor], Tensor]  # (pull, h [N, *S]) -> J
    apply: Callable[[Tensor, Tensor], Tensor]  # J, v [..., *S] -> J v
    compose: Callable[[Tensor, Tensor], Tensor]  # (later, earlier) -> their product
    transpose: Callable[[Tensor], Tensor]
    kernel: Optional[Callable[[Tensor, Tensor, bool], Tensor]] = None  # the binary's scan


def _block_rows(pull: Pull, h: Tensor) -> Tensor:
    """Returns J [N, ..., n, n], with one pull for each row of the blocks."""
    n = h.shape[-1]
    basis = torch.eye(n, dtype=h.dtype, device=h.device)
    return torch.stack([pull(row.expand_as(h)) for row in basis], -2)


def _dense_rows(pull: Pull, h: Tensor) -> Tensor:
    """Returns J [N, m, m] of the flattened state, with all rows in one batched pull."""
    m = h[0].numel()
    basis = torch.eye(m, dtype=h.dtype, device=h.device).view(m, 1, *h.shape[1:])
    rows = torch.func.vmap(pull)(basis.expand(m, *h.shape))
    return rows.movedim(0, 1).reshape(len(h), m, m)


def _dense_apply(a: Tensor, v: Tensor) -> Tensor:
    return multiply_vector(a, v.reshape(a.shape[:-1])).view(v.shape)


def _transpose(a: Tensor) -> Tensor:
    return a.transpose(-1, -2)


def _linear_kernel(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    flat = a.reshape(*b.shape[:2], -1), b.reshape(*b.shape[:2], -1)
    return linear_scan(*flat, reverse=reverse, backend=b.device.type).view(b.shape)


def _block_kernel(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    B, T, n = *b.shape[:2], b.shape[-1]
    flat = a.reshape(B, T, -1, n, n), b.reshape(B, T, -1, n)
    return block_scan(*flat, reverse=reverse, backend=b.device.type).view(b.shape)


STRUCTURES: Dict[str, Structure] = {}


def register_structure(structure: Structure) -> None:
    """Makes `structure` available to `solve` by its name. "auto" tries the built-in ones only."""
    if structure.name == "auto" or structure.name in STRUCTURES:
        raise ValueError(f"structure is {structure.name!r}, but that name is taken")
    STRUCTURES[structure.name] = structure


ones = lambda pull, h: pull(torch.ones_like(h))  # a sum over columns, which is the diagonal
same = lambda a: a
register_structure(Structure("diagonal", ones, torch.mul, torch.mul, same, _linear_kernel))
register_structure(
    Structure("block", _block_rows, multiply_vector, torch.matmul, _transpose, _block_kernel)
)
register_structure(Structure("dense", _dense_rows, _dense_apply, torch.matmul, _transpose))


def choose_mode(requested: str, structure: Structure, h: Tensor) -> str:
    """Returns "scan" (the binary's) or "torch" (scan_reference's); h [N, *S]. Raises ValueError if
    the mode is not available."""
    has = structure.kernel is not None and (
        structure.name != "block" or h.shape[-1] <= WIDEST_BLOCK
    )
    if requested == "auto":
        fits = has and select_backend("auto", h.device.type, BACKEND, h.dtype) != "reference"
        return "scan" if fits else "torch"
    if requested == "scan":
        # Raises if it is not available.
        select_backend(h.device.type, h.device.type, BACKEND, h.dtype)
        if not has:
            raise ValueError(
                f"mode is 'scan', but structure {structure.name!r} of states {list(h.shape[1:])} has "
                f"no scan in the binary, which takes diagonals and blocks of at most {WIDEST_BLOCK}"
            )
    return requested


def solve_linear(structure: Structure, a: Tensor, b: Tensor, reverse: bool, mode: str) -> Tensor:
    """Solves h_t = a_t h_{t-1} + b_t from 0, or with `reverse` from the end; b [B, T, *S], a [B, T,
    ...]."""
    if mode == "scan" and structure.kernel is not None:
        return structure.kernel(a, b, reverse)
    return scan_reference.scan(a, b, structure.compose, structure.apply, reverse)


PROBES = 256


def find_structure(jacobian: Any, h: Tensor, xs: Any, wanted: str) -> Structure:
    """Returns the structure named `wanted`, or for "auto" the narrowest that fits; ValueError if
    none does.

    jacobian(structure, h, xs) gives the Jacobians and the pull at rows h [N, *S], xs. At up to 256
    of the rows both are applied to two vectors and must agree: to a unit vector, whose result must
    be exactly 0 outside the structure, and to a vector of signs, which tests all entries to half
    the digits.
    """
    m = h[0].numel()
    count = min(PROBES, max(16, m))
    rows = torch.arange(count, device=h.device) * (len(h) - 1) // (count - 1)
    h, xs = h[rows], tuple(x[rows] for x in xs)
    unit = torch.zeros(count, m, dtype=h.dtype, device=h.device)
    at = torch.arange(count, device=h.device) * max(1, m // count) % m
    unit.scatter_(1, at[:, None], 1.0)
    fixed = torch.Generator("cpu").manual_seed(0)
    signs = torch.randn(count, m, generator=fixed, device="cpu").sign()
    vectors = unit.view_as(h), signs.to(h).view_as(h)
    narrow = ("diagonal", "block") if h.dim() > 2 or m <= WIDEST_BLOCK else ("diagonal",)
    for name in narrow if wanted == "auto" else (wanted,):
        if _fits(STRUCTURES[name], jacobian(STRUCTURES[name], h, xs), vectors):
            return STRUCTURES[name]
    if wanted == "auto":
        return STRUCTURES["dense"]
    raise _unfit(wanted)


def fits_everywhere(
    structure: Structure, found: Tuple[Tensor, Pull], h: Tensor, wanted: str
) -> bool:
    """Whether the Jacobians and the pull `found` at all rows h [N, *S] agree on a vector of signs.
    If they do not, and the structure was asked for by name, it raises ValueError."""
    if structure.name == "dense" and wanted == "auto":
        return True
    fixed = torch.Generator("cpu").manual_seed(1)
    signs = torch.randn(h.shape, generator=fixed, device="cpu").sign()
    if _agrees(structure, *found, signs.to(h)):
        return True
    if wanted == "auto":
        return False
    raise _unfit(wanted)


def _unfit(name: str) -> ValueError:
    return ValueError(
        f"structure is {name!r}, but the cell's Jacobian is not: torch.func.vjp gives other values "
        "than the structure (or jacobian_fn) does"
    )


def _fits(structure: Structure, found: Tuple[Tensor, Pull], vectors: Tuple[Tensor, Tensor]) -> bool:
    (a, pull), (unit, _) = found, vectors
    full = torch.full_like(a, 1 + 1j if a.is_complex() else 1)
    outside = structure.apply(structure.transpose(full), unit) == 0
    if bool((outside & (pull(unit).nan_to_num(0.0) != 0)).any()):  # NaN in x gives no evidence
        return False
    return all(_agrees(structure, a, pull, v) for v in vectors)


def _agrees(structure: Structure, a: Tensor, pull: Pull, v: Tensor) -> bool:
    """Whether the Jacobians a and the pull give the same v^T J, to half the digits."""
    want, got = pull(v), structure.apply(structure.transpose(a), v)
    gap = torch.where(want.isfinite() & got.isfinite(), (got - want).abs(), 0.0)
    scale = want.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return not bool((gap > torch.finfo(v.dtype).eps ** 0.5 * scale).any())
