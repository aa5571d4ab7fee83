"""The recurrences as plain loops over time, in torch, differentiable by autograd."""

from typing import List, Optional, Tuple

import torch

from .cells import Cell
from .sequences import Lowered, lower_masks, state_dtype


def lower(cell: Cell, x: torch.Tensor, weight: torch.Tensor, masks) -> Tuple[Lowered, torch.Tensor]:
    """Returns what the ops take as a batch [S, L, G, D] with no masks but reset and hold, the bias
    added, and the weight [P, D] without the bias."""
    weight, bias = weight[: cell.weights], weight[cell.weights :]
    if x.dim() == 5:
        x = x.permute(1, 2, 3, 0, 4).flatten(3)
    if len(bias):
        x = x.to(weight.dtype) + bias
    return lower_masks(x, *masks), weight


def sequence(
    cell: Cell,
    x: torch.Tensor,  # [B, T, G, D]
    weight: torch.Tensor,  # [P, D]
    state: Optional[torch.Tensor],  # [K, B, D]
    reset: Optional[torch.Tensor],  # [B, T]
    hold: Optional[torch.Tensor],  # [B, T]
    return_states: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
    """Runs `cell` over T: h [B, T, D], the last states [K, B, D] and, with `return_states`, the K - 1
    other states of every step [B, T, D]. States and arithmetic are in the state dtype."""
    B, _, _, D = x.shape
    dtype = state_dtype(x.dtype)
    w = weight.to(dtype).unbind()
    states = tuple(x.new_zeros(cell.states, B, D, dtype=dtype) if state is None else state)
    outputs = []
    for t, row in enumerate(x.unbind(1)):  # the gradient of unbind is one stack, not T sums
        if reset is not None:
            states = tuple(torch.where(reset[:, t, None], 0.0, s) for s in states)
        after = cell.step(row.to(dtype).unbind(1), w, states)
        each = after if return_states else after[:1]
        if hold is not None:
            held = hold[:, t, None]
            after = tuple(torch.where(held, s, a) for s, a in zip(states, after))
            each = tuple(torch.where(held, 0.0, s) for s in each)
        states = after
        outputs.append((each[0].to(x.dtype), *each[1:]))
    if not outputs:
        none = x.new_zeros(cell.states - 1 if return_states else 0, B, 0, D, dtype=dtype)
        return x.new_zeros(B, 0, D), torch.stack(states), list(none)
    h, *others = (torch.stack(s, 1) for s in zip(*outputs))
    return h, torch.stack(states), others


def scan(
    a: torch.Tensor,  # [B, T, D] or [B, T, D, n, n]
    b: torch.Tensor,  # [B, T, D] or [B, T, D, n]
    h0: Optional[torch.Tensor],  # b without T
    reverse: bool,
) -> torch.Tensor:  # shaped like b
    """Computes h_t = a_t h_{t-1} + b_t in the state dtype, rounded to b's dtype at the end."""
    dtype, T = state_dtype(b.dtype), b.shape[1]
    h = b.new_zeros(b.shape[:1] + b.shape[2:], dtype=dtype) if h0 is None else h0
    rows, outputs = list(zip(a.unbind(1), b.unbind(1))), [b] * T
    for t in reversed(range(T)) if reverse else range(T):
        at, bt = (row.to(dtype) for row in rows[t])
        h = (at * h if at.dim() == bt.dim() else (at * h.unsqueeze(-2)).sum(-1)) + bt
        outputs[t] = h.to(b.dtype)
    return torch.stack(outputs, 1) if outputs else b.clone()
