"""Gradients of the layers that are differentiable themselves (create_graph=True).

The ops of whole layers have none. On CUDA the cells' own ops run the layers again, whose gradients can be
differentiated once more. Elsewhere, for packed sequences and for projections, torch's recurrent functions
do, without cuDNN and oneDNN, whose gradients cannot be differentiated.
"""

import warnings
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from .dispatch import without_autocast
from .formulas import views_of
from .functional import recurrent
from .private_names import is_batched, may_set_flags

Tensors = Sequence[torch.Tensor]
SLOWER = (
    "create_graph=True: fused_rnn has no second derivatives of this call, so torch's own code computes "
    "these gradients, which takes longer"
)


def versions(state: Tensors) -> List[Optional[int]]:
    """Returns what tells later whether a tensor was changed in place; None of inference tensors."""
    try:
        return [s._version for s in state]
    except RuntimeError:  # of an inference tensor
        return [None if s.is_inference() else s._version for s in state]


def differentiable_gradients(
    cell: str, gates: int, x: torch.Tensor, state: Tensors, weights: Tensors, options: Any,
    masks: Tensors, dy: Optional[torch.Tensor], dlast: Sequence[Optional[torch.Tensor]],
) -> List[Optional[torch.Tensor]]:  # fmt: skip
    """Returns the gradients of x, of the states and of the weights; None for those that need none. `masks`
    is what the forward's dropout left between the layers."""
    batch_sizes, _, projects, *_ = options
    native = x.device.type == "cuda" and not projects and not batch_sizes
    if not native:
        warnings.warn(SLOWER, RuntimeWarning, stacklevel=2)
    with torch.enable_grad(), without_autocast(x.device.type), _plain_torch():
        inputs = views_of((x, *state, *weights))
        x, state, weights = inputs[0], inputs[1 : 1 + len(state)], inputs[1 + len(state) :]
        y, last = (run_cells if native else run)(cell, gates, x, state, weights, options, masks)
    pairs = [(o, d) for o, d in zip((y, *last), (dy, *dlast)) if d is not None and o.requires_grad]
    sources = [t for t in inputs if t.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, given = zip(*((o, d.to(o.dtype)) for o, d in pairs))
    found = iter(torch.autograd.grad(outputs, sources, given, create_graph=True, allow_unused=True))
    grads = [next(found) if t.requires_grad else None for t in inputs]
    return _in_memory_of_their_own(grads)


def _in_memory_of_their_own(grads: List[Optional[torch.Tensor]]) -> List[Optional[torch.Tensor]]:
    """Copies a gradient that is the same tensor as another: of b_ih and b_hh, which are added."""
    seen, results = set(), []
    for grad in grads:
        if grad is not None:
            memory = id(grad) if is_batched(grad) else grad.untyped_storage().data_ptr()
            grad = grad.clone() if memory in seen else grad
            seen.add(memory)
        results.append(grad)
    return results


def run(
    cell: str, gates: int, x: torch.Tensor, state: Tensors, weights: Tensors, options: Any,
    masks: Tensors = (),
) -> Tuple[torch.Tensor, Tensors]:  # fmt: skip
    """Does what layers_op.run_layers does, by torch's functions."""
    batch_sizes, has_bias, projects, directions, batch_first, _, dropout, _ = options
    weights = [w.to(x.dtype) for w in weights]
    state = [s.to(x.dtype) for s in state]
    layers = len(weights) // (((4 if has_bias else 2) + projects) * directions)
    if masks:  # one layer after the other
        each, y, lasts = len(weights) // layers, x, []
        for layer in range(layers):
            of_layer = slice(layer * directions, (layer + 1) * directions)
            own = weights[layer * each : (layer + 1) * each]
            y, last = run(cell, gates, y, [s[of_layer] for s in state], own, options)
            lasts.append(last)
            if layer < layers - 1:
                mask = masks[layer]
                by_time = not batch_sizes and not batch_first
                y = _drop(y, mask.transpose(0, 1) if by_time else mask, dropout)
        return y, [torch.cat(s) for s in zip(*lasts)]
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


def _drop(y: torch.Tensor, mask: torch.Tensor, dropout: float) -> torch.Tensor:
    return y * mask * (1 / (1 - dropout) if dropout < 1 else 0)


def run_cells(
    cell: str, gates: int, x: torch.Tensor, state: Tensors, weights: Tensors, options: Any,
    masks: Tensors = (),
) -> Tuple[torch.Tensor, Tensors]:  # fmt: skip
    """Does what `run` does, by the cells' ops, without projections and packed sequences."""
    _, has_bias, _, directions, batch_first, _, dropout, _ = options
    is_cell = x.dim() == 2
    y = x[:, None] if is_cell else x if batch_first else x.transpose(0, 1)
    given = iter(w.to(x.dtype) for w in weights)
    count = len(weights) // (4 if has_bias else 2)
    lasts, outputs = [], []
    for k in range(count):
        backwards = k % directions == 1
        w_ih, w_hh = next(given), next(given)
        H = w_hh.shape[1]
        b_ih, b_hh = (next(given), next(given)) if has_bias else (None, None)
        rows = F.linear(y.flip(1) if backwards else y, w_ih, b_ih).unflatten(-1, (gates, 1, H))
        bias = None if b_hh is None else _rows_of(cell, b_hh, H)
        first = tuple((s if is_cell else s[k]).unsqueeze(1) for s in state) or None
        h, last = recurrent(cell, rows, w_hh.view(gates, 1, H, H), bias, first)
        h = h.squeeze(2)
        outputs.append(h.flip(1) if backwards else h)
        lasts.append(last)
        if len(outputs) == directions:
            y, outputs = torch.cat(outputs, -1), []
            if masks and k + 1 < count:
                y = _drop(y, masks[k // directions], dropout)
    if is_cell:
        return y.squeeze(1), [s.squeeze(1).to(x.dtype) for s in lasts[0][1:]]
    last = [torch.stack(s).squeeze(2).to(x.dtype) for s in zip(*lasts)]
    return y if batch_first else y.transpose(0, 1), last


def _rows_of(cell: str, b_hh: torch.Tensor, H: int) -> torch.Tensor:
    """Returns b_hh as the cell's bias [R, 1, H]: GRU's third row is the input's alone."""
    if cell == "gru":
        b_hh = torch.cat([b_hh[: 2 * H], b_hh.new_zeros(H), b_hh[2 * H :]])
    return b_hh.view(-1, 1, H)


@contextmanager
def _plain_torch() -> Iterator[None]:
    backends: Any = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [backend.enabled for backend in backends]
    try:
        _enable(backends, [False, False])
        yield
    finally:
        _enable(backends, before)


def _enable(backends: Any, values: Sequence[bool]) -> None:
    with may_set_flags():
        for backend, value in zip(backends, values):
            backend.enabled = value
