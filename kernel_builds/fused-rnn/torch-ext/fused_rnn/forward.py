"""Converts torch.nn's forward arguments for the engine of stack.py, and its results back.

`module` has the attributes and the check functions of a torch.nn.LSTM, GRU, RNN or cell, `kernel`
the functions that stack.py names. Nothing else of flashcell is needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .checks import DTYPES
from .dispatch import has_autocast, without_autocast
from .packed import Layout, describe
from .padding import pad_heads, padded_width
from .plain import (
    as_tuple,
    cell_of,
    compute_dtype,
    is_plain,
    precision,
    run_ordinary_cell,
    run_ordinary_sequence,
    run_plain,
    run_plain_cell,
    used_weights,
)
from .private_names import (
    autocast_is_on_anywhere,
    first_weight,
    parameters_of_cell,
    update_weights,
    weights_of,
)
from .stack import Engine, make_heads, project


def run_sequence(module: Any, kernel: Any, input: Any, hx: Any = None) -> Any:
    """Runs the forward of a torch.nn.LSTM, GRU or RNN; returns output, and h_n or (h_n, c_n)."""
    if not torch.compiler.is_compiling():
        result = run_ordinary_sequence(module, kernel, input, hx)
        if result is not None:
            return result
        update_weights(module)  # check_input reads the weights
    if isinstance(input, PackedSequence):
        return _run_packed(module, kernel, input, hx)
    _check_sequence_dimensions(module, input, hx)
    batched, time = input.dim() == 3, 1 if module.batch_first else 0
    if not batched:
        input = input.unsqueeze(1 - time)
        if hx is not None:
            pair = cell_of(module) == "lstm"
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1)) if pair else hx.unsqueeze(1)
    _check_sizes(module, input, hx, None)
    _check_pair(cell_of(module), hx)
    if input.shape[time] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    weights = _parameters(module)
    _check_tensors(input, hx, weights[0])
    if is_plain(module, kernel, input, hx, weights):
        y, last = run_plain(module, kernel, input, hx, weights)
    else:
        x = input if module.batch_first else input.transpose(0, 1)
        y, last = _run(module, kernel, x, hx, weights, Layout())
        y = (y if module.batch_first else y.transpose(0, 1)).contiguous()
    if not batched:
        y, last = y.squeeze(1 - time), _each(last, lambda s: s.squeeze(1))
    return y, last


def _run_packed(module: Any, kernel: Any, input: PackedSequence, hx: Any) -> Any:
    data, batch_sizes, sorted_indices, unsorted_indices = input
    if hx is not None:
        hx = module.permute_hidden(hx, sorted_indices)  # takes the first two of what it gets
    _check_pair(cell_of(module), hx)
    if cell_of(module) == "lstm":  # torch.nn's forward leaves these checks to its products
        _check_tensors(data, hx, first_weight(module))
    _check_sizes(module, data, hx, batch_sizes)
    weights = _parameters(module)
    _check_tensors(data, hx, weights[0])
    if is_plain(module, kernel, data, hx, weights, batch_sizes):
        y, last = run_plain(module, kernel, data, hx, weights, batch_sizes.tolist())
    else:
        packed = describe(batch_sizes, data.device)
        y, last = _run(module, kernel, packed.unpack(data), hx, weights, packed.layout)
        y = packed.pack(y)
    output = PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices)
    return output, module.permute_hidden(last, unsorted_indices)


def _run(
    module: Any, kernel: Any, x: Tensor, hx: Any, weights: list[Tensor], layout: Layout
) -> tuple[Tensor, Any]:
    """Runs x [B, T, I]; returns [B, T, directions * P], and torch's states [layers * directions, B,
    ...]."""
    dtype, exact_sums = _autocast(x)
    with exact_sums:
        cell, options = cell_of(module), {"precision": precision(x)}
        engine = Engine(kernel, cell, layout, options, module.hidden_size)
        N, spec = 2 if module.bidirectional else 1, kernel.CELLS[cell]
        each = len(weights) // (N * module.num_layers)  # parameters of a head
        parameters = [weights[at : at + each] for at in range(0, len(weights), each)]
        layers = [
            make_heads(spec, parameters[at : at + N], module.bias)
            for at in range(0, N * module.num_layers, N)
        ]
        width = padded_width(x.device.type, dtype, x.shape[1], module.hidden_size)
        if width != module.hidden_size:
            layers = [
                pad_heads(heads, spec.gates, width, N if number > 0 else 0)
                for number, heads in enumerate(layers)
            ]
        x, states, firsts = x.to(dtype), None, None
        if hx is not None:
            parts = zip(*(s.split(N) for s in as_tuple(hx)))
            entered = [engine.enter(h, s, dtype) for h, s in zip(layers, parts)]
            states = [state for state, _ in entered]
            firsts = [first for _, first in entered] if module.proj_size > 0 else None
        dropout = module.dropout if module.training else 0.0
        y, lasts = engine.run_layers(layers, x, states, firsts, dropout)
        left = [engine.leave(h, s) for h, s in zip(layers, lasts)]
        last = tuple(torch.cat(parts).to(dtype) for parts in zip(*left))
        if width != module.hidden_size and module.proj_size == 0:
            y = y.view(*y.shape[:2], N, width)[..., : module.hidden_size].flatten(2)
    return y, last if len(last) > 1 else last[0]


def _parameters(module: Any) -> list[Tensor]:
    """Returns the parameters of all layers and directions, each read once, as torch.nn does when it
    looks for changes: computed parameters (spectral_norm's iteration) are then computed as often
    as there."""
    compiling = torch.compiler.is_compiling()
    weights = [w for ws in module.all_weights for w in ws] if compiling else weights_of(module)
    return used_weights(module, weights)


def run_cell(module: Any, kernel: Any, cell: str, input: Tensor, hx: Any = None) -> Any:
    """Runs the forward of a torch.nn.LSTMCell, GRUCell or RNNCell; returns h' or (h', c')."""
    weights = parameters_of_cell(module)
    if not torch.compiler.is_compiling():
        next_state = run_ordinary_cell(module, kernel, cell, input, hx, weights)
        if next_state is not None:
            return next_state
    _check_cell_dimensions(f"{cell.partition('_')[0].upper()}Cell", input, hx)
    batched = input.dim() == 2
    if not batched:
        input = input.unsqueeze(0)
        if hx is not None:
            pair = cell == "lstm"
            hx = (hx[0].unsqueeze(0), hx[1].unsqueeze(0)) if pair else hx.unsqueeze(0)
    _check_pair(cell, hx)
    _check_cell_sizes(module, weights, input, as_tuple(hx))
    _check_tensors(input, hx, weights[0])
    states = as_tuple(hx)
    last = run_plain_cell(kernel, cell, input, states, weights)
    if last is None:
        last = _run_cell(kernel, cell, input, states, weights)
    last = last if batched else tuple(s.squeeze(0) for s in last)
    return last if len(last) > 1 else last[0]


def _run_cell(
    kernel: Any, cell: str, input: Tensor, states: tuple[Tensor, ...], parameters: list[Tensor]
) -> tuple[Tensor, ...]:
    """Does what run_plain_cell does, by ops that traces and transforms follow."""
    dtype, exact_sums = _autocast(input)
    with exact_sums:
        engine = Engine(kernel, cell, Layout(), {}, parameters[1].shape[1])
        heads = make_heads(kernel.CELLS[cell], [parameters], len(parameters) > 2)
        gates = project(kernel, input.to(dtype)[None, :, None], heads.w_ih)
        state = tuple(s.unsqueeze(1) for s in states) if states else None
        h, (_, *others) = engine.advance(heads, gates, state)
        return h[0, :, 0], *(s[:, 0].to(dtype) for s in others)


def _autocast(x: Tensor) -> tuple[torch.dtype, AbstractContextManager]:
    """Returns the dtype to compute in, and a context without autocast: states' products stay fp32."""
    kind = x.device.type
    if not has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype, nullcontext()
    return compute_dtype(x), without_autocast(kind)


def _each(hx: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to a state or to each state of a tuple; None stays None."""
    if hx is None or isinstance(hx, Tensor):
        return None if hx is None else change(hx)
    return tuple(map(change, hx))


# The checks of torch.nn's forwards and operators, with their messages.
def _check_sequence_dimensions(module: Any, input: Tensor, hx: Any) -> None:
    wanted = input.dim()
    if wanted not in (2, 3):
        kind, _, elman = cell_of(module).partition("_")
        had = f"{wanted}D tensor" if elman else f"{wanted}D"
        raise ValueError(f"{kind.upper()}: Expected input to be 2D or 3D, got {had} instead")
    if hx is None:
        return
    found = [s.dim() for s in ((hx[0], hx[1]) if cell_of(module) == "lstm" else (hx,))]
    if any(dim != wanted for dim in found):
        batched = "batched" if wanted == 3 else "unbatched"
        names, had = "hx", f"{found[0]}-D tensor"
        if len(found) > 1:
            names, had = "hx and cx", f"({', '.join(f'{dim}-D' for dim in found)}) tensors"
        raise RuntimeError(
            f"For {batched} {wanted}-D input, {names} should also be {wanted}-D but got {had}"
        )


def _check_sizes(module: Any, input: Tensor, hx: Any, batch_sizes: Tensor | None) -> None:
    if hx is None:
        module.check_input(input, batch_sizes)
    else:
        module.check_forward_args(input, hx, batch_sizes)


def _check_pair(cell: str, hx: Any) -> None:
    """Checks an LSTM's pair of states, with the messages of torch.nn's operators."""
    if hx is None or not cell.startswith("lstm"):
        return
    if not isinstance(hx, (tuple, list)):
        raise TypeError(f"hx is a {type(hx).__name__}, but must be a tuple of two tensors, (h, c)")
    if len(hx) != 2:
        raise RuntimeError(f"{cell} expects two hidden states, but hx has {len(hx)}")


def _check_cell_dimensions(kind: str, input: Tensor, hx: Any) -> None:
    named = [("input", input)]
    if hx is not None and kind == "LSTMCell":
        named += [(f"hx[{k}]", s) for k, s in enumerate(hx)]
    elif hx is not None:
        named.append(("hidden", hx))
    for name, value in named:
        if value.dim() not in (1, 2):
            had = f"got {value.dim()}D instead"
            raise ValueError(f"{kind}: Expected {name} to be 1D or 2D, {had}")


def _check_cell_sizes(
    module: Any, weights: list[Tensor], input: Tensor, states: tuple[Tensor, ...]
) -> None:
    """Checks the sizes of a cell's call. The weights count, as somebody may have set other ones; only
    torch.nn's zeros for a state that is not given have the module's hidden_size."""
    (B, I), (_, wanted), (_, D) = input.shape, weights[0].shape, weights[1].shape
    if wanted != I:
        raise RuntimeError(f"input has inconsistent input_size: got {I} expected {wanted}")
    if not states and module.hidden_size != D:
        had = f"got {module.hidden_size}, expected {D}"
        raise RuntimeError(f"hidden0 has inconsistent hidden_size: {had}")
    for k, s in enumerate(states):
        if s.dim() != 2:
            had = f"(batch x hidden_size), but got {s.dim()}D tensor"
            raise RuntimeError(f"Expected 2D hidden{k} {had}")
        if s.shape[0] != B:
            had = f"doesn't match hidden{k} batch size {s.shape[0]}"
            raise RuntimeError(f"Input batch size {B} {had}")
        if s.shape[1] != D:
            had = f"got {s.shape[1]}, expected {D}"
            raise RuntimeError(f"hidden{k} has inconsistent hidden_size: {had}")


def _check_tensors(input: Tensor, hx: Any, weight: Tensor) -> None:
    """Refuses tensors that torch.nn's checks accept and its products refuse: other devices and
    layouts, any input that an active autocast would not cast (integers, float64), and such
    states."""
    if input.device != weight.device:
        raise RuntimeError(
            "Input and parameter tensors are not at the same device, found input tensor at "
            f"{input.device} and parameter tensor at {weight.device}"
        )
    for name, value in (("input", input), *(("hx", s) for s in as_tuple(hx))):
        if value.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise RuntimeError(f"{name} has dtype {value.dtype}, but must be one of {allowed}")
        if value.layout != torch.strided:
            raise RuntimeError(f"{name} has layout {value.layout}, but must be {torch.strided}")
        if value.device != input.device:
            raise RuntimeError(
                "Input and hidden tensors are not at the same device, found input tensor at "
                f"{input.device} and hidden tensor at {value.device}"
            )
    kinds, exact = {input.dtype, weight.dtype}, torch.float64
    if len(kinds) > 1 and (exact in kinds or not autocast_is_on_anywhere()):
        wanted = f"the weights', {weight.dtype}"
        raise RuntimeError(f"input has dtype {input.dtype}, but must have {wanted}")
