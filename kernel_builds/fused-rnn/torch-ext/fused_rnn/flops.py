"""Tells torch.utils.flop_counter.FlopCounterMode how many operations the ops take.

Counted are the matrix products that torch.nn's own modules would run for the same outputs and gradients, two
operations for each product of two numbers, and nothing else: no activations, no biases. torch.nn multiplies
initial states of zeros too, so these count. It multiplies no gradient of a first state that needs none, nor
of an input that needs none. The gradients of all weights count, which the ops compute always. torch counts 0
for an LSTM that oneDNN or cuDNN runs.

The kernel is loaded by the first call of a module. A FlopCounterMode that was made before counts 0.
The arguments are shapes in the place of tensors.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from math import prod
from typing import Any, Dict, Sequence, Tuple

from .cell_op import OPS
from .cells import CELLS
from .dispatch import BACKEND, ops

COUNTER = "torch.utils.flop_counter"
Shape = Tuple[int, ...]


def product(rows: int, *shape: int) -> int:
    """The operations of a product of so many rows with a matrix of this shape."""
    return 2 * rows * prod(shape)


def rows_of(
    x: Shape, batch_sizes: Sequence[int], batch_first: bool, reverse: bool
) -> Tuple[int, int]:
    """Returns the rows of x, and how many of them torch.nn multiplies first in a direction."""
    if batch_sizes:
        return x[0], batch_sizes[-1 if reverse else 0]
    rows = prod(x[:-1])
    return rows, x[0 if batch_first or len(x) == 2 else 1]


def heads(weights: Sequence[Shape], has_bias: bool, projects: bool, directions: int) -> Any:
    """Yields the number of a layer, whether a direction is the second, and its w_ih, w_hh and w_hr or []."""
    each = (4 if has_bias else 2) + projects
    for head in range(len(weights) // each):
        w = weights[head * each : (head + 1) * each]
        yield head // directions, head % directions == 1, w[0], w[1], [w[-1]] if projects else []


def layers_fwd(
    x: Shape, state: Any, weights: Sequence[Shape], batch_sizes: Sequence[int], has_bias: bool,
    projects: bool, directions: int, batch_first: bool, *options: Any, **out: Any,
) -> int:  # fmt: skip
    rows, _ = rows_of(x, batch_sizes, batch_first, False)
    found = heads(weights, has_bias, projects, directions)
    return sum(product(rows, *w) for _, _, w_ih, w_hh, w_hr in found for w in (w_ih, w_hh, *w_hr))


def layers_bwd(
    dy: Any, dlast: Any, x: Shape, weights: Sequence[Shape], kept: Any, batch_sizes: Sequence[int],
    has_bias: bool, projects: bool, directions: int, batch_first: bool, width: int, dropout: float,
    tf32: bool, wants_dx: bool, wants_dstate: bool, *options: Any, **out: Any,
) -> int:  # fmt: skip
    total = 0
    for layer, second, w_ih, w_hh, w_hr in heads(weights, has_bias, projects, directions):
        rows, first = rows_of(x, batch_sizes, batch_first, second)
        total += product(rows, *w_ih) * (2 if layer > 0 or wants_dx else 1)
        total += product(rows, *w_hh) + product(rows if wants_dstate else rows - first, *w_hh)
        total += sum(2 * product(rows, *w) for w in w_hr)
    return total


def of_cell(states: int) -> Any:
    """Returns the formulas of the ops of a torch.nn cell with so many states, by their names."""

    def forward(x: Shape, *others: Any, **out: Any) -> int:
        return sum(product(x[0], *weight) for weight in others[states : states + 2])

    def backward(*arguments: Any, **out: Any) -> int:
        x, w_ih, w_hh = arguments[states : states + 3]
        wants_dx, wants_dstate = arguments[-2:]
        return product(x[0], *w_ih) * (1 + wants_dx) + product(x[0], *w_hh) * (1 + wants_dstate)

    return {"cell_fwd": forward, "cell_train_fwd": forward, "cell_bwd": backward}


def fwd(x: Shape, weight: Shape, *options: Any, **out: Any) -> int:
    return product(prod(x[:2]), *weight)


def bwd(
    dh: Shape, dlast: Any, saved: Any, h_prev: Any, weight: Shape, reset: Any, hold: Any, lengths: Any,
    cu_seqlens: Any, grad_clip: Any, tf32: bool, wants_dweight: bool, *options: Any, **out: Any,
) -> int:  # fmt: skip
    return product(prod(dh[:2]), *weight) * ((grad_clip != 0) + wants_dweight)


def linear_fwd(x: Shape, weight: Shape, bias: Any, **out: Any) -> int:
    return product(prod(x[:-1]), *weight)


def linear_bwd(dy: Any, x: Shape, weight: Shape, has_bias: bool, **out: Any) -> int:
    return 2 * product(prod(x[:-1]), *weight)


def tf32_matmul(a: Shape, b: Shape, **out: Any) -> int:
    return product(prod(a[:-1]), *b[1:])


def register_all(counter: Any) -> None:
    of_cells: Dict[str, Any] = {f"{n}_{f.__name__}": f for n in CELLS for f in (fwd, bwd)}
    of_cells |= {f"{n}_{f.__name__}": f for n in OPS for f in (layers_fwd, layers_bwd)}
    for cell, found in OPS.items():
        formulas = of_cell(len(found.no_state)).items()
        of_cells |= {f"{cell}_{name}": formula for name, formula in formulas}
    others = {"linear_fwd": linear_fwd, "linear_bwd": linear_bwd}
    if BACKEND == "cuda":
        others["tf32_matmul"] = tf32_matmul
    for name, formula in {**of_cells, **others}.items():
        counter.register_flop_formula(getattr(ops, name))(formula)


class WhenImported(MetaPathFinder):
    """Registers the formulas when somebody imports the counter, which imports Triton on a GPU."""

    finds = False  # whether it asks the other finders

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != COUNTER or self.finds:
            return None
        self.finds = True
        try:
            spec = find_spec(name)
        finally:
            self.finds = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                register_all(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if COUNTER in sys.modules:
    register_all(sys.modules[COUNTER])
else:
    sys.meta_path.insert(0, WhenImported())
