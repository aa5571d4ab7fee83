"""Gradients of the layers that are differentiable themselves (create_graph=True).

The kernels have none. So torch's own recurrent functions run the layers again, without cuDNN and oneDNN,
whose gradients cannot be differentiated, and autograd differentiates them as often as asked.
"""

import warnings
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch

from .dispatch import without_autocast

Tensors = Sequence[torch.Tensor]
SLOWER = (
    "create_graph=True: fused_rnn's kernels have no second derivatives, so torch's own code computes "
    "these gradients, which takes longer"
)


def versions(state: Tensors) -> List[Optional[int]]:
    """Returns what tells later whether a tensor was changed in place; None of inference tensors."""
    return [None if s.is_inference() else s._version for s in state]


def differentiable_gradients(
    cell: str, gates: int, x: torch.Tensor, state: Tensors, weights: Tensors, options: Any,
    dy: Optional[torch.Tensor], dlast: Sequence[Optional[torch.Tensor]],
) -> List[Optional[torch.Tensor]]:  # fmt: skip
    """Returns the gradients of x, of the states and of the weights; None for those that need none."""
    warnings.warn(SLOWER, RuntimeWarning, stacklevel=2)
    inputs = [x, *state, *weights]
    with torch.enable_grad(), without_autocast(x.device.type), _plain_torch():
        y, last = run(cell, gates, x, state, weights, options)
    pairs = [(o, d) for o, d in zip((y, *last), (dy, *dlast)) if d is not None and o.requires_grad]
    sources = [t for t in inputs if t.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, given = zip(*((o, d.to(o.dtype)) for o, d in pairs))
    found = iter(torch.autograd.grad(outputs, sources, given, create_graph=True, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def run(
    cell: str, gates: int, x: torch.Tensor, state: Tensors, weights: Tensors, options: Any
) -> Tuple[torch.Tensor, Tensors]:
    """Does what layers_op.run_layers does, by torch's functions."""
    batch_sizes, has_bias, projects, directions, batch_first, _, _, _ = options
    weights = [w.to(x.dtype) for w in weights]
    state = [s.to(x.dtype) for s in state]
    layers = len(weights) // (((4 if has_bias else 2) + projects) * directions)
    rows, O = weights[1].shape
    is_cell = x.dim() == 2 and not batch_sizes
    if not state:
        B = batch_sizes[0] if batch_sizes else x.shape[0 if is_cell or batch_first else 1]
        outer = (B,) if is_cell else (layers * directions, B)
        widths = (O, rows // gates) if cell == "lstm" else (O,)
        state = [x.new_zeros(*outer, width) for width in widths]
    hx: Any = state if cell == "lstm" else state[0]
    if is_cell:
        result = getattr(torch, f"{cell}_cell")(x, hx, *weights)
        return (result[0], [result[1]]) if cell == "lstm" else (result, [])
    function = getattr(torch, cell)
    fixed = has_bias, layers, 0.0, False, directions == 2
    if batch_sizes:
        y, *last = function(x, torch.tensor(batch_sizes, device="cpu"), hx, weights, *fixed)
    else:
        y, *last = function(x, hx, weights, *fixed, batch_first)
    return y, last


@contextmanager
def _plain_torch() -> Iterator[None]:
    backends: Any = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [backend.enabled for backend in backends]
    try:
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        for backend, enabled in zip(backends, before):
            backend.enabled = enabled
