"""One decoding step of a diagonal cell's published block, between its linear layers: two kernels on
CUDA and two calls on the CPU, torch elsewhere. States and windows are changed in place; there
are no gradients."""

import math
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .checks import (
    STATE,
    Named,
    check_count,
    check_input,
    check_no_gradient,
    check_number,
    check_operands,
    check_tensor,
    find_cell,
)
from .conv import TAPS
from .dispatch import BACKEND, ops, select_backend, without_autocast
from .memory import check_apart, check_written
from .projection import multiply_heads
from .sequences import state_dtype

CONV = ("x", "weight", "bias", "window", "window")
MIXER = [
    ("x", "weight", "gate", "skip", "bias", *rows, "state")
    for rows in (("rows[0]",), ("rows[0]", "rows[1]"))
]


def conv_step(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], window: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Computes the next step of silu(causal_conv): x [B, D], weight [D, K], bias [D] or None -> y
    [B, D].

    window [B, K - 1, D] holds the steps before and is changed: x is its last one then. All in x's dtype;
    the sum is in fp32 (fp64 for fp64). "cuda" and "cpu" have K = 4 and pairs of channels. ValueError and
    TypeError name the argument, what it was and what it must be.
    """
    _check_rows(x)
    check_tensor("window", window, x.device)
    (B, D), past = x.shape, window.shape[1] if window.dim() == 3 else TAPS - 1
    named: List[Named] = [("weight", weight, (D, past + 1), "[D, K]"), ("bias", bias, (D,), "[D]")]
    named.append(("window", window, (B, past, D), "[B, K - 1, D]"))
    check_operands(named, x.dtype, x.device)
    check_no_gradient("conv_step", CONV, x, weight, bias, window)
    fits = check_written("window", window) and past + 1 == TAPS and D % 2 == 0
    check_apart(CONV, 1, x, weight, bias, window)
    if _select(backend, x, fits) != "reference":
        return ops.conv_step_(x, weight, bias, window)
    wide, seen = state_dtype(x.dtype), torch.cat([window, x[:, None]], 1)
    with without_autocast(x.device.type):
        y = torch.einsum("bkd,dk->bd", seen.to(wide), weight.to(wide))
    window.copy_(seen[:, 1:])
    return F.silu(y if bias is None else y + bias).to(x.dtype)


def mixer_step(
    cell: str, x: Tensor, weight: Tensor, bias: Optional[Tensor], rows: Tuple[Tensor, ...],
    state: Tuple[Tensor, ...], skip: Tensor, gate: Tensor, *, bound: Optional[float] = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Computes (h' + skip x) silu(gate), where h' is the next state of the cell with this name.

        u[g, n J + j] = sum over i of weight[n, g, j, i] x[n I + i]  +  bias[g, n J + j]

    x, gate [B, D], weight [N, 3, J, I] with N I = N J = D, bias [3, D] or None, skip [D]; rows: the
    cell's a [3, D] and, if it has peepholes, p [2, D], cut off at +-bound; all of x's dtype. state: its
    tensors [B, D] in fp32 (fp64 for fp64), changed -> y [B, D]. See `flash_gru` and `flash_lstm`.
    """
    spec = find_cell(cell)
    _check_rows(x)
    wide, (B, D) = state_dtype(x.dtype), x.shape
    check_tensor("weight", weight, x.device)
    N, _, J, _ = weight.shape if weight.dim() == 4 else (1, 3, D, D)
    if N * J != D or weight.shape[1:] != (3, J, J):
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be [N, 3, J, J] with N J = {D}"
        )
    peepholes = spec.weights - 3
    check_count("rows", rows, 1 + (peepholes > 0), cell)
    check_count("state", state, spec.states, cell)
    named: List[Named] = [("gate", gate, (B, D), "[B, D]"), ("skip", skip, (D,), "[D]")]
    named += [("bias", bias, (3, D), "[3, D]"), ("rows[0]", rows[0], (3, D), "[3, D]")]
    named += [("rows[1]", p, (peepholes, D), "[2, D]") for p in rows[1:]]
    named.append(("weight", weight, (N, 3, J, J), "[N, 3, J, J]"))
    check_operands(named, x.dtype, x.device)
    states = [(STATE[k], s, (B, D), "[B, D]") for k, s in enumerate(state)]
    check_operands(states, wide, x.device)
    if bound is not None:
        check_number("bound", bound, "None or a number >= 0")
    names, given = MIXER[spec.weights > 3], (x, weight, gate, skip, bias, *rows, *state)
    check_no_gradient("mixer_step", names, *given)
    fits = J % 2 == 0
    for k, s in enumerate(state):
        fits = check_written(STATE[k], s) and fits
    check_apart(names, spec.states, *given)
    with without_autocast(x.device.type):
        u = multiply_heads(x, weight)  # [N, B, G, J]
    if _select(backend, x, fits) != "reference":
        a, p = (*rows, None)[:2]
        h, c = (*state, None)[:2]
        step = getattr(ops, f"{cell}_mix_step_")
        return step(u, a, p, bias, h, c, x, skip, gate, math.inf if bound is None else bound)
    u = u.permute(1, 2, 0, 3).flatten(2).to(wide)  # [B, G, D]
    u = u if bias is None else u + bias
    own = torch.cat([r.to(wide) for r in rows])
    own = own if bound is None else own.clamp(-bound, bound)
    h, last, _ = reference.sequence(spec, u[:, None], own, torch.stack(state), None, None)
    for s, new in zip(state, last):
        s.copy_(new)
    return ((h[:, 0] + skip * x) * F.silu(gate.to(wide))).to(x.dtype)


def _select(backend: str, x: Tensor, fits: bool) -> str:
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    if backend in ("cuda", "cpu") and not fits:
        raise ValueError(
            f"backend is {backend!r}, but needs {TAPS} taps, heads of an even width, and states and "
            "windows that are contiguous"
        )
    return chosen if fits else "reference"


def _check_rows(x: Tensor) -> None:
    check_input("x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [B, D]")
