"""Runs all layers of a torch.nn LSTM, GRU or RNN as one op, and their gradients as another.

The host limits the speed of a small call. So this file does nothing that the common case does not need;
stack.py runs all other cases.
"""

import itertools
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from .batched import any_batched, run_each
from .cells import CELLS, Cell
from .dispatch import BACKEND, ops
from .formulas import is_recorded, register_fake
from .private_names import BelowAutograd, EagerFunction, any_requires_grad, graph_stays, op_of
from .second_order import differentiable_gradients, versions
from .wavefront import Sizes, aligned, chunk_of, kept_of_chunks, masks_of_chunks

Tensors = Sequence[torch.Tensor]
# The arguments of the ops that are no tensors: batch_sizes, has_bias, projects, directions, batch_first,
# width, dropout, tf32
Options = Tuple[Sequence[int], bool, bool, int, bool, int, float, bool]


class LayerOps(NamedTuple):
    """The ops of a cell. `run` is the forward for calls that nothing compiles."""

    forward: Any
    run: Any
    backward: Any
    gates: int
    cell: str


OPS: Dict[str, LayerOps] = {}


def run_layers(
    cell: str, x: torch.Tensor, state: Tensors, weights: Tensors, options: Options
) -> Tuple[torch.Tensor, Tensors]:
    """Returns the outputs, with rows as those of x, and the K last states, [layers * directions, B, D],
    in the dtype of x; of a cell without h, which is the output.

    x is [B, T, I], [T, B, I] or the data of a PackedSequence, or [B, I] for one step of a cell, whose
    states are [B, D]; `state` is empty or has K tensors as the last states, in the dtype of x or in the states'; `weights` are the parameters of a torch.nn module
    in its order, in the dtype of x or in fp32. torch.compile follows it, but no other trace or
    transform does (formulas.is_eager)."""
    layer_ops = OPS[cell]
    if torch.compiler.is_compiling():
        save = is_recorded(x, *state, *weights)
        y, last, _ = layer_ops.forward(x, state, weights, *options, save, 0)
        return y, last
    if torch.is_grad_enabled() and any_requires_grad(x, *state, *weights):
        y, *last = _Layers.apply(layer_ops, options, len(state), x, *state, *weights)
        return y, last
    chunk = chunk_of(cell, x, weights, options, False) if x.is_cuda else 0
    with BelowAutograd():
        y, last, _ = layer_ops.run(x, state, weights, *options, False, chunk)
    return y, last


class _Layers(EagerFunction):
    @staticmethod
    def forward(
        ctx: Any, layer_ops: LayerOps, options: Options, K: int, x: Any, *tensors: Any
    ) -> Any:
        state, weights = tensors[:K], tensors[K:]
        chunk = chunk_of(layer_ops.cell, x, weights, options, True) if x.is_cuda else 0
        with BelowAutograd():
            y, last, kept = layer_ops.run(x, state, weights, *options, True, chunk)
        reads = _reads(ctx.needs_input_grad, K, *options[1:4], _has_steps(x, options))
        _keep(ctx, layer_ops, x, state, weights, options, kept, chunk, reads)
        ctx.state = state
        ctx.versions = versions((*state, *ctx.unread))
        return (y, *last)

    @staticmethod
    def backward(ctx: Any, dy: Any, *dlast: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, None, *_differentiate_twice(ctx, dy, dlast))
        wants_dx, wants_dstate = ctx.needs_input_grad[3], any(ctx.needs_input_grad[4 : -ctx.count])

        saved = _saved(ctx)

        def differentiate(given: Sequence[Any]) -> List[Any]:
            dy, *dlast = given
            dx, dstate, dweights = _differentiate(ctx, saved, dy, dlast, wants_dx, wants_dstate)
            return [dx, *dstate, *dweights]

        with BelowAutograd():
            if any_batched(dy, *dlast):
                found = run_each(differentiate, [dy, *dlast])
            else:
                found = differentiate([dy, *dlast])
        if not graph_stays():
            ctx.state = ctx.unread = ()  # the node lives as long as the loss does
        dx, *rest = found
        dstate = rest[: -ctx.count] or [None] * len(ctx.state_dtypes)
        return (None, None, None, dx, *dstate, *rest[-ctx.count :])


def _has_steps(x: torch.Tensor, options: Options) -> bool:
    """Whether there is a step after the first."""
    batch_sizes, _, _, _, batch_first, *_ = options
    if x.dim() == 2:
        return len(batch_sizes) > 1
    return x.shape[1 if batch_first else 0] > 1


@lru_cache(maxsize=1024)
def _reads(
    needs: Tuple[bool, ...],
    K: int,
    has_bias: bool,
    projects: bool,
    directions: int,
    has_steps: bool,
) -> Tuple[bool, ...]:
    """Whether the backward reads x, and each of the weights: the gradient of an operand depends on its weight.
    torch.nn's own code saves the same, so that the others may be changed in place."""
    x, state, weights = needs[3], needs[4 : 4 + K], needs[4 + K :]
    h = K > 0 and state[0]
    each = (4 if has_bias else 2) + projects
    found = [False] * len(weights)
    upstream = x  # whether the input of a layer needs a gradient
    for layer in range(0, len(weights), each * directions):
        heads = range(layer, layer + each * directions, each)
        moves = [upstream or any(state) or any(weights[at : at + each]) for at in heads]
        for at, moved in zip(heads, moves):
            found[at], found[at + 1] = upstream, h or (has_steps and moved)
            if projects:
                found[at + each - 1] = moved
        upstream = any(moves)
    return (any(weights[: each * directions : each]), *found)


def _keep(
    ctx: Any, layer_ops: LayerOps, x: torch.Tensor, state: Tensors, weights: Tensors,
    options: Options, kept: Tensors, chunk: int, reads: Optional[Tuple[bool, ...]] = None,
) -> None:  # fmt: skip
    """Keeps in an autograd context what the backward reads. Of x and the weights it saves those that `reads`
    names, or all: autograd refuses changes in place of these alone."""
    ctx.set_materialize_grads(False)
    given = x, *weights
    ctx.reads = reads or (True,) * len(given)
    ctx.save_for_backward(*itertools.compress(given, ctx.reads), *kept)
    ctx.unread = [t for t, read in zip(given, ctx.reads) if not read]
    ctx.layer_ops, ctx.options, ctx.count, ctx.chunk = layer_ops, options, len(weights), chunk
    ctx.state_dtypes = [s.dtype for s in state]


def _saved(ctx: Any) -> Tensors:
    """Returns x, the weights and what the forward kept."""
    saved = iter(ctx.saved_tensors)  # read once: torch.utils.checkpoint allows no more
    unread = iter(ctx.unread)
    return [*[next(saved if read else unread) for read in ctx.reads], *saved]


def _differentiate(
    ctx: Any, saved: Tensors, dy: Any, dlast: Sequence[Any], wants_dx: bool, wants_dstate: bool
) -> Any:
    """Returns the gradients of x or None, of the states or an empty list, and of the weights."""
    x, *others = saved
    weights, kept = others[: ctx.count], others[ctx.count :]
    known = [d for d in dlast if d is not None]
    if len(known) < len(dlast):
        rows, O = weights[1].shape
        widths = O, *[rows // ctx.layer_ops.gates] * (len(dlast) - 1)
        zeros = (known[0].new_zeros(*known[0].shape[:-1], width) for width in widths if known)
        dlast = [z if d is None else d for d, z in zip(dlast, zeros)]
    dx, dstate, dweights = ctx.layer_ops.backward(
        dy, dlast, x, weights, kept, *ctx.options, wants_dx, wants_dstate, ctx.chunk
    )
    dstate = [d.to(dtype) for d, dtype in zip(dstate, ctx.state_dtypes)]
    return dx if wants_dx else None, dstate, dweights


def _differentiate_twice(ctx: Any, dy: Any, dlast: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients of x, states and weights, differentiable."""
    x, *saved = _saved(ctx)
    found, K = versions((*ctx.state, *ctx.unread)), len(ctx.state)
    if found != ctx.versions:
        changed = "an initial state" if found[:K] != ctx.versions[:K] else "the input or a weight"
        raise RuntimeError(
            f"{changed} was changed in place after the forward, but create_graph=True needs it as it was: "
            "pass a clone"
        )
    weights, masks = saved[: ctx.count], _masks(ctx, saved, x)
    cell, gates = ctx.layer_ops.cell, ctx.layer_ops.gates
    given = x, ctx.state, weights, ctx.options
    return differentiable_gradients(cell, gates, *given, masks, dy, dlast)


def _masks(ctx: Any, saved: Tensors, x: torch.Tensor) -> Tensors:
    """Returns what the forward's dropout left of the outputs of each layer but the last: [B, T, N O], of a
    PackedSequence [rows, N O]."""
    masks = [k for k in saved[ctx.count :] if k.dtype is torch.bool]
    if not masks or ctx.chunk == 0:
        return masks
    _, has_bias, _, _, batch_first, *_ = ctx.options
    B, T = x.shape[0 if batch_first else 1], x.shape[1 if batch_first else 0]
    L, D = ctx.count // (4 if has_bias else 2), saved[1].shape[1]
    return masks_of_chunks(masks, L, B, T, D, ctx.chunk)


def _register(cell: Cell) -> None:
    """Registers the fakes and, for compiled graphs, the gradient of a cell's ops."""
    layer_ops = OPS[cell.name]
    G, K, V = cell.gates, cell.states, cell.saved

    @register_fake(f"{cell.name}_layers_fwd")
    def _(
        x, state, weights, batch_sizes, has_bias, projects, directions, batch_first, width, dropout,
        tf32, save, chunk,
    ):  # fmt: skip
        N, D, O = directions, weights[1].shape[0] // G, weights[1].shape[1]
        L = len(weights) // (((4 if has_bias else 2) + projects) * N)
        if x.dim() == 2:
            rows, B, T = x.shape[0], (batch_sizes or x.shape)[0], len(batch_sizes) or 1
        else:
            rows, B = x.shape[0] * x.shape[1], x.shape[0 if batch_first else 1]
            T = x.shape[1 if batch_first else 0]
        inner = (rows,) if x.dim() == 2 else (B, T)
        outer = (L * N, B) if x.dim() == 3 or batch_sizes else (B,)
        own = B * len(batch_sizes) if batch_sizes and x.is_cuda else rows  # rows of the engine
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.new_empty(*x.shape[:-1], N * O)
        first = 1 if x.dim() == 2 and not batch_sizes else 0  # a cell's h is y
        last = [x.new_empty(*outer, D if k > 0 else O) for k in range(first, K)]
        if not save:
            return y, last, []
        if chunk > 0:
            sizes = Sizes(L, B, T, x.shape[-1], width, G, V, chunk)
            packs = width != D or weights[0].dtype != x.dtype
            return y, last, kept_of_chunks(x, sizes, dropout, packs)
        kept, size, packs = [], 0, width != D or weights[0].dtype != x.dtype
        steps = projects and width == D and not x.is_cuda
        for number in range(L):
            if number > 0 and dropout > 0:
                kept.append(x.new_empty(*inner, N * O, dtype=torch.bool))
            if number > 0:
                kept.append(x.new_empty(*inner, N * O))
            kept.append(x.new_empty(own, V, N, width, dtype=x.dtype if x.is_cuda else wide))
            reads_h = T > 1 or (len(state) > 0 and (steps or not projects))
            read = O if steps else width
            kept.append(x.new_empty(own if reads_h else 0, N, read))
            if projects:
                kept.append(x.new_empty(own, N * width))
            size += aligned(G * N * width * width)
            if packs:
                size += N * aligned(G * width * (N * O if number > 0 else x.shape[-1]))
        packs = not steps and (N == 2 or packs or projects)
        packed = [x.new_empty(size)] if packs else []
        if projects:
            packed.append(x.new_empty(L * N if len(state) else 0, B, O))
        return y, last, packed + kept

    @register_fake(f"{cell.name}_layers_bwd")
    def _(
        dy, dlast, x, weights, kept, batch_sizes, has_bias, projects, directions, batch_first, width,
        dropout, tf32, wants_dx, wants_dstate, chunk,
    ):  # fmt: skip
        B = batch_sizes[0] if batch_sizes else x.shape[0 if batch_first or x.dim() == 2 else 1]
        LN = len(weights) // ((4 if has_bias else 2) + projects)
        outer = (B,) if x.dim() == 2 and not batch_sizes else (LN, B)
        widths = [weights[1].shape[1], *[weights[1].shape[0] // G] * (K - 1)]
        dtype = torch.promote_types(x.dtype, torch.float32)
        dstate = [x.new_empty(*outer, width, dtype=dtype) for width in widths if wants_dstate]
        dx = x.new_empty(x.shape if wants_dx else (0,))
        return dx, dstate, [w.new_empty(w.shape) for w in weights]

    def setup_context(ctx, inputs, output):
        x, state, weights, *options, _, chunk = inputs
        _keep(ctx, layer_ops, x, state, weights, options, output[2], chunk)

    def backward(ctx, dy, dlast, _):
        x, state, *_ = ctx.needs_input_grad
        wants_dstate = any(state) if isinstance(state, (list, tuple)) else bool(state)
        dx, dstate, dweights = _differentiate(ctx, _saved(ctx), dy, dlast, x, wants_dstate)
        dstate = dstate or [None] * len(ctx.state_dtypes)
        sizes: Any = None if ctx.options[0] else []  # torch takes an empty list for one of tensors
        return (dx, dstate, dweights, sizes, *(None,) * 9)

    torch.library.register_autograd(layer_ops.forward, backward, setup_context=setup_context)


if BACKEND is not None:
    for _cell in CELLS.values():
        _forward = getattr(ops, f"{_cell.name}_layers_fwd").default
        OPS[_cell.name] = LayerOps(
            _forward,
            op_of(_forward),
            getattr(ops, f"{_cell.name}_layers_bwd").default,
            _cell.gates,
            _cell.name,
        )
        _register(_cell)
