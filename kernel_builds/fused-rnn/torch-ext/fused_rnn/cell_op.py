"""Runs one step of a torch.nn LSTMCell, GRUCell or RNNCell, and its gradients, as ops without lists.

The host limits the speed of a cell of few units, and takes several microseconds to pass the lists of tensors
that the ops for all layers have.
"""

from typing import Any, Dict, NamedTuple, Sequence, Tuple

import torch

from .cells import CELLS, Cell
from .dispatch import BACKEND, ops
from .formulas import register_fake
from .layers_op import MOST_STATES, LayerOps, record_layers
from .layers_op import OPS as LAYER_OPS
from .private_names import BelowAutograd, any_requires_grad, op_of

Tensors = Sequence[torch.Tensor]


class CellOps(NamedTuple):
    """The ops of a cell: `step` for inference, and `layers` for training, in the form of the ops for all
    layers. `no_state` stands for the states that a call does not have."""

    step: Any
    layers: LayerOps
    no_state: Tuple[None, ...]


OPS: Dict[str, CellOps] = {}


def run_step(cell: str, x: torch.Tensor, state: Tensors, weights: Tensors, tf32: bool) -> Any:
    """Returns h', of an LSTM (h', c'), [B, D], for x [B, I] and `state`, h or h and c [B, D], or empty for
    zeros; `weights` are w_ih [G D, I], w_hh [G D, D] and, if any, b_ih and b_hh [G D].

    All tensors have one dtype; no trace or transform may be at work (formulas.is_eager)."""
    step, layers, no_state = OPS[cell]
    has_bias = len(weights) > 2
    if torch.is_grad_enabled() and any_requires_grad(x, *state, *weights):
        options = (), has_bias, False, 1, True, weights[1].shape[1], 0.0, tf32
        h, last = record_layers(layers, x, state, weights, options)
        return (h, *last) if last else h
    with BelowAutograd():
        if has_bias:
            return step(x, *(state or no_state), *weights, tf32)
        return step(x, *(state or no_state), *weights, None, None, tf32)


def _layer_ops(cell: Cell) -> LayerOps:
    """Returns ops for all layers whose `run` and `run_back` call the ops of the cell."""
    forward, backward = (
        op_of(getattr(ops, f"{cell.name}_cell_{pass_}").default) for pass_ in ("train_fwd", "bwd")
    )
    no_state, K = (None,) * cell.states, cell.states

    def run(x: Any, state: Tensors, weights: Any, *options: Any) -> Tuple[Any, Tensors, Tensors]:
        if len(weights) == 2:
            weights = *weights, None, None
        h, *rest = forward(x, *(state or no_state), *weights, options[7])
        return h, rest[: K - 1], rest[K - 1 :]

    def run_back(
        dh: Any, dlast: Tensors, x: Any, weights: Any, kept: Tensors, *options: Any
    ) -> Tuple[Any, Tensors, Tensors]:
        count, (tf32, wants_dx, wants_dstate, _) = len(weights), options[7:]
        if count == 2:
            weights = *weights, None, None
        dc = dlast or no_state[1:]
        dx, *rest = backward(dh, *dc, x, *weights, *kept, tf32, wants_dx, wants_dstate)
        return dx, rest[:K], rest[K : K + count]

    return LAYER_OPS[cell.name]._replace(run=run, run_back=run_back)


def _register(cell: Cell) -> None:
    """Registers the fakes of a cell's ops."""
    K, V = cell.states, cell.saved

    def next_states(x: Any, others: Any) -> Tuple[Any, ...]:
        return tuple(x.new_empty(x.shape[0], others[K + 1].shape[1]) for _ in range(K))

    @register_fake(f"{cell.name}_cell_fwd")
    def _(x, *others):
        found = next_states(x, others)
        return found[0] if K == 1 else found

    @register_fake(f"{cell.name}_cell_train_fwd")
    def _(x, *others):
        B, D = x.shape[0], others[K + 1].shape[1]
        dtype = x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)
        saved = x.new_empty(B, V, 1, D, dtype=dtype)
        return *next_states(x, others), saved, x.new_empty(B if others[0] is not None else 0, 1, D)

    @register_fake(f"{cell.name}_cell_bwd")
    def _(*arguments):
        x, w_ih, w_hh, b_ih, b_hh, _, _, _, wants_dx, wants_dstate = arguments[K:]
        dtype = torch.promote_types(x.dtype, torch.float32)
        sizes = (x.shape[0], w_hh.shape[1]) if wants_dstate else (0,)
        dstate = [x.new_empty(sizes, dtype=dtype if wants_dstate else None) for _ in range(K)]
        weights = [x.new_empty(0 if w is None else w.shape) for w in (w_ih, w_hh, b_ih, b_hh)]
        return x.new_empty(x.shape if wants_dx else 0), *dstate, *weights


if BACKEND is not None:
    for _cell in CELLS.values():
        if _cell.states <= MOST_STATES:
            _step = op_of(getattr(ops, f"{_cell.name}_cell_fwd").default)
            OPS[_cell.name] = CellOps(_step, _layer_ops(_cell), (None,) * _cell.states)
            _register(_cell)
