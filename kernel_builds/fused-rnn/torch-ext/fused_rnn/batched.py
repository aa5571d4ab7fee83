"""Runs gradients for a batch of output gradients: is_grads_batched, jacobian(vectorize=True), and
torch.vmap over torch.autograd.grad.

torch runs an op that has no rule for batches once for each element, but it cannot do so for an op
that takes lists of tensors, as the ops for layers do. So all tensors pass as one vector through
another op.
"""

import itertools
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from .dispatch import BACKEND, ops
from .private_names import is_batched

_running: Dict[int, Callable] = {}  # what the op run_each calls, by its number
_numbers = itertools.count()

if BACKEND is not None:
    _library = torch.library.Library(ops.name, "FRAGMENT")
    _library.define("run_each(Tensor vector, int number) -> Tensor")

    def _run(vector: torch.Tensor, number: int) -> torch.Tensor:
        if number not in _running:
            raise RuntimeError(
                "a trace of batched gradients is replayed, but their backward is over"
            )
        return _running[number](vector)

    _library.impl("run_each", _run, "CompositeExplicitAutograd")


def any_batched(*tensors: Optional[torch.Tensor]) -> bool:
    for t in tensors:  # noqa: SIM110 (a generator would take longer)
        if t is not None and is_batched(t):
            return True
    return False


def run_each(function: Callable, given: Sequence[Optional[torch.Tensor]]) -> List[Any]:
    """Calls function(given), which returns a list of tensors and None, once for each element of the
    batches in `given`; returns batches of its results."""
    forms: List[Optional[torch.Tensor]] = []

    def run(vector: torch.Tensor) -> torch.Tensor:
        results = function(_split(vector, given))
        forms[:] = [r if r is None else torch.empty_like(r, device="meta") for r in results]
        return _join(results, vector.dtype)

    dtype = next(t.dtype for t in given if t is not None)
    number = next(_numbers)
    _running[number] = run
    try:
        vector = ops.run_each(_join(given, torch.promote_types(dtype, torch.float32)), number)
    finally:
        del _running[number]
    return _split(vector, forms)


def _join(tensors: Sequence[Optional[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors if t is not None])


def _split(vector: torch.Tensor, forms: Sequence[Optional[torch.Tensor]]) -> List[Any]:
    """Undoes _join, for tensors of the forms given; None stays None."""
    parts = iter(vector.split([t.numel() for t in forms if t is not None]))
    return [None if t is None else next(parts).reshape(t.shape).to(t.dtype) for t in forms]
