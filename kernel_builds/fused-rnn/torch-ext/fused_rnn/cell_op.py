"""Runs one step of a torch.nn LSTMCell, GRUCell or RNNCell as one op.

The host limits the speed of a cell of few units. In inference the op of a cell therefore has plain
arguments: torch takes several times as long to pass lists of tensors, as the op for all layers has them.
"""

from typing import Any, Dict, NamedTuple, Sequence, Tuple

import torch

from .cells import CELLS
from .dispatch import BACKEND, ops
from .formulas import register_fake
from .layers_op import run_layers
from .private_names import BelowAutograd, any_requires_grad, op_of

MOST_STATES = 2  # of torch.nn's cells


class CellOp(NamedTuple):
    run: Any
    no_state: Tuple[None, ...]


OPS: Dict[str, CellOp] = {}


def run_step(
    cell: str, x: torch.Tensor, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    tf32: bool,
) -> Any:  # fmt: skip
    """Returns h', of an LSTM (h', c'), [B, D], for x [B, I] and `state`, h or h and c [B, D], or empty for
    zeros; `weights` are w_ih [G D, I], w_hh [G D, D] and, if any, b_ih and b_hh [G D].

    All tensors have one dtype; no trace or transform may be at work (formulas.is_eager)."""
    has_bias = len(weights) > 2
    if torch.is_grad_enabled() and any_requires_grad(x, *state, *weights):
        options = (), has_bias, False, 1, True, weights[1].shape[1], 0.0, tf32
        h, last = run_layers(cell, x, state, weights, options, True)
        return (h, *last) if last else h
    op, no_state = OPS[cell]
    with BelowAutograd():
        if has_bias:
            return op(x, *(state or no_state), *weights, tf32)
        return op(x, *(state or no_state), *weights, None, None, tf32)


def _register(name: str, states: int) -> None:
    @register_fake(name)
    def _(x, h, *rest):
        w_hh = rest[states]
        found = [x.new_empty(x.shape[0], w_hh.shape[1]) for _ in range(states)]
        return found[0] if states == 1 else tuple(found)


if BACKEND is not None:
    for _cell in CELLS.values():
        if _cell.states <= MOST_STATES:
            _name = f"{_cell.name}_cell_fwd"
            OPS[_cell.name] = CellOp(op_of(getattr(ops, _name).default), (None,) * _cell.states)
            _register(_name, _cell.states)
