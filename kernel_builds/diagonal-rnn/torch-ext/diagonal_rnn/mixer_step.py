"""A decoded token of a diagonal cell's published block, between the block's linear layers: two
launches on CUDA and calls on the CPU, torch elsewhere. States and windows are changed where they lie; no gradients.
"""

import math
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .cells import CELLS
from .checks import check_floating, check_shape, check_tensor
from .conv import TAPS
from .dispatch import BACKEND, ops, select_backend
from .projection import headwise_product

Named = Tuple[str, Optional[Tensor], Tuple[int, ...], str]  # name, value, shape, its letters


def conv_step(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], window: Tensor, *, backend: str = "auto"
) -> Tensor:
    """The next step of silu(causal_conv): x [B, D], weight [D, K], bias [D] or None -> y [B, D].

    window [B, K - 1, D] holds the steps before and is changed: x is its last one then. All in x's dtype;
    the sum is in fp32 (fp64 for fp64). "cuda" and "cpu" have K = 4 and pairs of channels. ValueError and
    TypeError name the argument, what it was and what it must be.
    """
    check_tensor("x", x)
    check_floating("x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [B, D]")
    check_tensor("window", window, x.device)
    (B, D), past = x.shape, window.shape[1] if window.dim() == 3 else TAPS - 1
    named = [("weight", weight, (D, past + 1), "[D, K]"), ("bias", bias, (D,), "[D]")]
    _check(x, [*named, ("window", window, (B, past, D), "[B, K - 1, D]")])
    fits = past + 1 == TAPS and D % 2 == 0 and window.is_contiguous()
    if _select(backend, x, (weight, bias), fits) != "reference":
        return ops.conv_step_(x, weight, bias, window)
    wide, seen = reference.state_dtype(x.dtype), torch.cat([window, x[:, None]], 1)
    y = torch.einsum("bkd,dk->bd", seen.to(wide), weight.to(wide))
    window.copy_(seen[:, 1:])
    return F.silu(y if bias is None else y + bias).to(x.dtype)


def mixer_step(
    cell: str, x: Tensor, weight: Tensor, bias: Optional[Tensor], rows: Tuple[Tensor, ...],
    state: Tuple[Tensor, ...], skip: Tensor, gate: Tensor, *, bound: Optional[float] = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """(h' + skip x) silu(gate), where h' is the next state of the cell with this name.

        u[g, n J + j] = sum over i of weight[n, g, j, i] x[n I + i]  +  bias[g, n J + j]

    x, gate [B, D], weight [N, 3, J, I] with N I = N J = D, bias [3, D] or None, skip [D]; rows: the
    cell's a [3, D] and, if it has peepholes, p [2, D], cut off at +-bound; all of x's dtype. state: its
    tensors [B, D] in fp32 (fp64 for fp64), changed -> y [B, D]. See `flash_gru` and `flash_lstm`.
    """
    if cell not in CELLS:
        raise ValueError(f"cell is {cell!r}, but must be one of {', '.join(CELLS)}")
    spec, wide = CELLS[cell], reference.state_dtype(x.dtype)
    u = headwise_product(x, weight)  # [N, B, G, J]
    (B, D), J = x.shape, u.shape[-1]
    peepholes = spec.weights - 3
    if len(rows) != 1 + (peepholes > 0):
        raise ValueError(f"rows are {len(rows)} tensors, but must be {1 + (peepholes > 0)}")
    if len(state) != spec.states:
        raise ValueError(f"state has {len(state)} tensors, but must have {spec.states}")
    named: List[Named] = [("gate", gate, (B, D), "[B, D]"), ("skip", skip, (D,), "[D]")]
    named += [("bias", bias, (3, D), "[3, D]"), ("rows[0]", rows[0], (3, D), "[3, D]")]
    named += [("rows[1]", p, (peepholes, D), "[2, D]") for p in rows[1:]]
    _check(x, named)
    _check(x, [(f"state[{k}]", s, (B, D), "[B, D]") for k, s in enumerate(state)], wide)
    fits = J % 2 == 0 and all(s.is_contiguous() for s in state)
    if _select(backend, x, (weight, bias, skip, gate, *rows, *state), fits) != "reference":
        a, p = (*rows, None)[:2]
        h, c = (*state, None)[:2]
        step = getattr(ops, f"{cell}_mix_step_")
        return step(u, a, p, bias, h, c, x, skip, gate, math.inf if bound is None else bound)
    u = u.permute(1, 2, 0, 3).flatten(2).to(wide)  # [B, G, D]
    u = u if bias is None else u + bias
    own = torch.cat([r.to(wide) for r in rows])
    own = own if bound is None else own.clamp(-bound, bound)
    h, last = reference.sequence(spec, u[:, None], own, torch.stack(state), None, None)
    for s, new in zip(state, last):
        s.copy_(new)
    return ((h[:, 0] + skip * x) * F.silu(gate.to(wide))).to(x.dtype)


def _select(backend: str, x: Tensor, others, fits: bool) -> str:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        raise ValueError("a gradient is required, but a decoded step has none")
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    if backend in ("cuda", "cpu") and not fits:
        raise ValueError(
            f"backend is {backend!r}, but needs {TAPS} taps, heads of an even width, and states and "
            "windows that are contiguous"
        )
    return chosen if fits else "reference"


def _check(x: Tensor, named, dtype: Optional[torch.dtype] = None) -> None:
    """(name, tensor or None, shape, letters) of x's device, and of `dtype` or x's."""
    for name, value, shape, letters in named:
        if value is None:
            continue
        check_tensor(name, value, x.device)
        check_shape(name, value, shape, letters)
        if value.dtype != (dtype or x.dtype):
            raise TypeError(f"{name} has dtype {value.dtype}, but must be {dtype or x.dtype}")
