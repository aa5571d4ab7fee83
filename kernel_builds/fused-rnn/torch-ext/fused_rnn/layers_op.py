"""Runs all layers of a torch.nn LSTM, GRU or RNN as one op, and their gradients as another.

The host limits the speed of a small call. So this file does nothing that the common case does not need;
stack.py runs all other cases.
"""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

from .batched import any_batched, run_each
from .cells import CELLS, Cell
from .dispatch import BACKEND, ops
from .formulas import is_recorded, register_fake
from .private_names import BelowAutograd, EagerFunction, any_requires_grad, graph_stays, op_of
from .second_order import differentiable_gradients, versions
from .unread import unread_places
from .wavefront import Sizes, aligned, chunk_of, kept_of_chunks, masks_of_chunks

MOST_STATES = 2  # of torch.nn's cells, whose modules these ops run
Tensors = Sequence[torch.Tensor]
# The arguments of the ops that are no tensors: batch_sizes, has_bias, projects, directions, batch_first,
# width, dropout, tf32
Options = Tuple[Sequence[int], bool, bool, int, bool, int, float, bool]


class LayerOps(NamedTuple):
    """The ops of a cell. `run` and `run_back` are forward and backward for calls that nothing
    compiles."""

    forward: Any
    run: Any
    backward: Any
    run_back: Any
    gates: int
    cell: str


OPS: Dict[str, LayerOps] = {}


def run_layers(
    cell: str, x: torch.Tensor, state: Tensors, weights: Tensors, options: Options,
    eager: bool = False,
) -> Tuple[torch.Tensor, Tensors]:  # fmt: skip
    """Returns the outputs, with rows as those of x, and the K last states, [layers * directions, B, D],
    in the dtype of x. For one step of a cell the states leave out h, which is the output.

    x is [B, T, I], [T, B, I] or the data of a PackedSequence, or [B, I] for one step of a cell, whose
    states are [B, D]; `state` is empty or has K tensors as the last states, in the dtype of x or in
    the states'; `weights` are the parameters of a torch.nn module in its order, in the dtype of x or in
    fp32. torch.compile follows it, but no other trace or transform does (formulas.is_followed);
    `eager`: the caller has checked that torch.compile is not at work."""
    layer_ops = OPS[cell]
    if not eager and torch.compiler.is_compiling():
        save = is_recorded(x, *state, *weights)
        y, last, _ = layer_ops.forward(x, state, weights, *options, save, 0)
        return y, last
    if torch.is_grad_enabled() and any_requires_grad(x, *state, *weights):
        return record_layers(layer_ops, x, state, weights, options)
    chunk = chunk_of(cell, x, weights, options, False) if x.is_cuda else 0
    with BelowAutograd():
        y, last, _ = layer_ops.run(x, state, weights, *options, False, chunk)
    return y, last


def record_layers(
    layer_ops: LayerOps, x: torch.Tensor, state: Tensors, weights: Tensors, options: Options
) -> Tuple[torch.Tensor, Tensors]:
    """Does what run_layers does, for a backward pass to follow."""
    y, *last = _Layers.apply(layer_ops, options, len(state), x, *state, *weights)
    return y, last


class _Layers(EagerFunction):
    @staticmethod
    def forward(
        ctx: Any, layer_ops: LayerOps, options: Options, K: int, x: Any, *tensors: Any
    ) -> Any:
        state, weights = tensors[:K], tensors[K:]
        if x.is_inference():  # autograd saves no tensor of inference_mode
            x = x.clone()
        has_chunks = x.is_cuda and x.dim() == 3
        chunk = chunk_of(layer_ops.cell, x, weights, options, True) if has_chunks else 0
        with BelowAutograd():
            y, last, kept = layer_ops.run(x, state, weights, *options, True, chunk)
        unread = unread_places(ctx.needs_input_grad, K, *options[1:4], _has_steps(x, options))
        _keep(ctx, layer_ops, x, state, weights, options, kept, chunk, unread)
        ctx.state = state
        ctx.versions = versions((*state, *ctx.unread))
        return (y, *last)

    @staticmethod
    def backward(ctx: Any, dy: Any, *dlast: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, None, *_differentiate_twice(ctx, dy, dlast))
        needs, saved = ctx.needs_input_grad, _saved(ctx)
        wants = needs[3], True in needs[4 : -ctx.count]
        op = ctx.layer_ops.run_back
        with BelowAutograd():
            if any_batched(dy, *dlast):
                one = lambda given: _differentiate(ctx, op, saved, given[0], given[1:], *wants)
                found = run_each(one, [dy, *dlast])
            else:
                found = _differentiate(ctx, op, saved, dy, dlast, *wants)
        if not graph_stays():
            ctx.state = ctx.unread = ()  # the node lives as long as the loss does
        return (None, None, None, *found)


def _has_steps(x: torch.Tensor, options: Options) -> bool:
    """Whether there is a step after the first."""
    batch_sizes, _, _, _, batch_first, *_ = options
    if x.dim() == 2:
        return len(batch_sizes) > 1
    return x.shape[1 if batch_first else 0] > 1


def _keep(
    ctx: Any, layer_ops: LayerOps, x: torch.Tensor, state: Tensors, weights: Tensors,
    options: Options, kept: Tensors, chunk: int, unread: Tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Keeps in an autograd context what the backward reads. It saves x and the weights but for those at the
    places `unread`, because autograd refuses changes in place of what is saved."""
    ctx.set_materialize_grads(False)
    saved, ctx.unread, ctx.places = [x, *weights], [], unread
    for place in reversed(unread):
        ctx.unread.append(saved.pop(place))
    ctx.save_for_backward(*saved, *kept)
    ctx.layer_ops, ctx.options, ctx.count, ctx.chunk = layer_ops, options, len(weights), chunk
    ctx.state_dtypes = [s.dtype for s in state] if state else ()


def _saved(ctx: Any) -> Tensors:
    """Returns x, the weights and what the forward kept."""
    saved = [*ctx.saved_tensors]  # read once: torch.utils.checkpoint allows no more
    for place, tensor in zip(ctx.places, reversed(ctx.unread)):
        saved.insert(place, tensor)
    return saved


def _differentiate(
    ctx: Any, op: Any, saved: Tensors, dy: Any, dlast: Sequence[Any], wants_dx: bool,
    wants_dstate: bool,
) -> List[Any]:  # fmt: skip
    """Returns the gradients of x and the states, None where none are wanted, and of the weights."""
    end = 1 + ctx.count
    x, weights, kept = saved[0], saved[1:end], saved[end:]
    if dlast:
        dlast = _without_none(ctx, dlast, weights)
    dx, dstate, dweights = op(
        dy, dlast, x, weights, kept, *ctx.options, wants_dx, wants_dstate, ctx.chunk
    )
    if wants_dstate:
        dstate = [d.to(dtype) for d, dtype in zip(dstate, ctx.state_dtypes)]
    else:
        dstate = [None] * len(ctx.state_dtypes)
    return [dx if wants_dx else None, *dstate, *dweights]


def _without_none(ctx: Any, dlast: Sequence[Any], weights: Tensors) -> Sequence[Any]:
    """Returns the gradients of the last states with zeros for None, and an empty list if all are None."""
    known = [d for d in dlast if d is not None]
    if not known or len(known) == len(dlast):
        return known
    rows, O = weights[1].shape
    widths = O, *[rows // ctx.layer_ops.gates] * (len(dlast) - 1)
    zeros = (known[0].new_zeros(*known[0].shape[:-1], width) for width in widths)
    return [z if d is None else d for d, z in zip(dlast, zeros)]


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
        saved, op = _saved(ctx), layer_ops.backward
        dx, *rest = _differentiate(ctx, op, saved, dy, dlast, x, wants_dstate)
        dstate, dweights = rest[: -ctx.count], rest[-ctx.count :]
        sizes: Any = None if ctx.options[0] else []  # torch takes an empty list for one of tensors
        return (dx, dstate, dweights, sizes, *(None,) * 9)

    torch.library.register_autograd(layer_ops.forward, backward, setup_context=setup_context)


if BACKEND is not None:
    for _cell in CELLS.values():
        if _cell.states > MOST_STATES:
            continue
        _forward = getattr(ops, f"{_cell.name}_layers_fwd").default
        _backward = getattr(ops, f"{_cell.name}_layers_bwd").default
        OPS[_cell.name] = LayerOps(
            _forward,
            op_of(_forward),
            _backward,
            op_of(_backward),
            _cell.gates,
            _cell.name,
        )
        _register(_cell)
