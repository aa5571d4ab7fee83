"""Runs the modules of torch.nn whose layers are one op (layers_op.py), and says which are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .checks import DTYPES
from .dispatch import has_autocast
from .formulas import is_eager, is_followed
from .packed import fits_rows
from .padding import padded_width
from .private_names import product_precision, recurrent_precision, unchanged_weights


def is_plain(
    module: Any, kernel: Any, x: Tensor, hx: Any, weights: list[Tensor], batch_sizes: Any = None
) -> bool:
    """Whether one op can run all layers: with weights of one dtype, without traces and transforms."""
    kind, stored = x.device.type, weights[0].dtype
    if kind != kernel.BACKEND:
        return False
    traced = torch.compiler.is_compiling()
    random = module.training and module.dropout > 0
    if (random or batch_sizes is not None) if traced else not is_eager():
        return False
    dtype = compute_dtype(x)
    if module.proj_size > 0 and (batch_sizes is not None or stored is not dtype):
        return False
    if not _fits(x, dtype, as_tuple(hx), weights):
        return False
    if batch_sizes is None or kind == "cpu":
        return True
    return fits_rows(len(x), len(batch_sizes), int(batch_sizes[0]))


def _fits(x: Tensor, dtype: torch.dtype, states: tuple[Tensor, ...], weights: list[Tensor]) -> bool:
    """Whether the op takes the tensors, to compute in `dtype`."""
    stored = weights[0].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32  # of the states
    if stored is not dtype and (stored is not torch.float32 or wide is not torch.float32):
        return False
    if x.numel() == 0 or (x.is_cuda and dtype is torch.float64):
        return False
    for w in weights:
        if w.dtype is not stored:
            return False
    return all(s.dtype is dtype or s.dtype is wide for s in states)


def run_ordinary_cell(
    module: Any, kernel: Any, cell: str, x: Tensor, hx: Any, weights: list[Tensor]
) -> Any:
    """Runs the call of a cell that passes all checks and needs no conversion; returns h' or (h', c'),
    and None for other calls. torch.compile must not be at work. Nothing is asked twice,
    because the host limits the speed of one step."""
    pair = cell == "lstm"
    states = _as_states(hx, pair)
    if states is None or not _are_ordinary(kernel.BACKEND, x, states, weights):
        return None
    D, I = weights[1].shape[1], weights[0].shape[1]
    size = (*x.shape[:-1], D)
    if x.dim() not in (1, 2) or x.shape[-1] != I or (not states and module.hidden_size != D):
        return None
    for s in states:
        if s.shape != size:
            return None
    # torch.nn's cells are products of torch, and follow their setting.
    tf32 = x.dtype is torch.float32 and x.is_cuda and product_precision() == "tf32"
    if x.dim() == 2:
        return kernel.run_step(cell, x, states, weights, tf32)
    states = tuple(s.unsqueeze(0) for s in states)
    found = kernel.run_step(cell, x.unsqueeze(0), states, weights, tf32)
    return tuple(s.squeeze(0) for s in found) if pair else found.squeeze(0)


def _as_states(hx: Any, pair: bool) -> tuple[Any, ...] | None:
    """Returns the states in a tuple, and None if hx is no tuple of two where it must be one."""
    if hx is None:
        return ()
    if not pair:
        return (hx,)
    return hx if type(hx) is tuple and len(hx) == 2 else None


def _are_ordinary(
    kind: str | None, x: Tensor, states: tuple[Any, ...], weights: list[Tensor]
) -> bool:
    """Whether all are tensors of one dtype on one device, and nothing converts or follows them: no
    autocast, torch.jit.trace or transform."""
    dtype, index = x.dtype, x.get_device()
    if kind is None or dtype not in DTYPES or x.layout is not torch.strided or x.is_meta:
        return False
    if x.numel() == 0 or (dtype is torch.float64 and kind == "cuda"):
        return False
    for w in weights:
        if w.dtype is not dtype or w.get_device() != index:
            return False
    for s in states:
        if not isinstance(s, Tensor) or s.dtype is not dtype or s.get_device() != index:
            return False
        if s.layout is not torch.strided or s.is_meta:
            return False
    return not torch.is_autocast_enabled(kind) and not is_followed()


def run_plain_cell(
    kernel: Any, cell: str, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]
) -> tuple[Tensor, ...] | None:
    """Runs a cell of torch.nn by the op for layers: x [B, I], states [B, D] -> the next states. Returns
    None where the op cannot run it."""
    if x.device.type != kernel.BACKEND or not is_eager():
        return None
    dtype = compute_dtype(x)
    if not _fits(x, dtype, states, weights):
        return None
    tf32 = dtype is torch.float32 and x.is_cuda and product_precision() == "tf32"
    x = x if x.dtype is dtype else x.to(dtype)
    options = ((), len(weights) > 2, False, 1, True, weights[1].shape[1], 0.0, tf32)
    h, last = kernel.run_layers(cell, x, states, weights, options)
    return (h, *last)


def run_ordinary_sequence(module: Any, kernel: Any, input: Any, hx: Any) -> Any:
    """Does for the layers of an LSTM, GRU or RNN what run_ordinary_cell does for a cell: returns output,
    and h_n or (h_n, c_n), and None for a call that is not ordinary."""
    weights = unchanged_weights(module)
    packed = type(input) is PackedSequence
    x = input.data if packed else input
    if weights is None or type(x) is not Tensor or x.dim() != (2 if packed else 3):
        return None
    cell = cell_of(module)
    states = _as_states(hx, cell == "lstm")
    if states is None or not _are_ordinary(kernel.BACKEND, x, states, weights):
        return None
    batch_sizes: Any = ()
    if packed:
        if states or module.proj_size > 0:
            return None
        module.check_input(x, input.batch_sizes)
        batch_sizes = input.batch_sizes.tolist()
        if x.is_cuda and not fits_rows(len(x), len(batch_sizes), batch_sizes[0]):
            return None
    elif states:
        for s in states:
            if s.dim() != 3:
                return None
        module.check_forward_args(x, hx, None)
    else:
        module.check_input(x, None)
    weights = used_weights(module, weights)
    tf32 = x.dtype is torch.float32 and x.is_cuda and recurrent_precision() == "tf32"
    y, last = _run_layers(module, kernel, cell, x, states, weights, batch_sizes, tf32, True)
    if not packed:
        return y, last
    output = PackedSequence(y, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
    return output, module.permute_hidden(last, input.unsorted_indices)


def cell_of(module: Any) -> str:
    """Returns the name in CELLS of the cell of a torch.nn.LSTM, GRU or RNN. A user's LSTM or GRU may have
    a `mode` with another meaning."""
    if isinstance(module, nn.LSTM):
        return "lstm"
    return "gru" if isinstance(module, nn.GRU) else module.mode.lower()


def used_weights(module: Any, weights: list[Tensor]) -> list[Tensor]:
    """Returns the weights of the first `num_layers` layers: somebody may have set the attribute since."""
    each = (4 if module.bias else 2) + (module.proj_size > 0)
    count = module.num_layers * (2 * each if module.bidirectional else each)
    if len(weights) < count:
        raise RuntimeError(
            f"Expected more weights in stacked_rnn: num_layers is {module.num_layers}, which takes "
            f"{count}, but the module has {len(weights)}"
        )
    return weights if len(weights) == count else weights[:count]


def run_plain(
    module: Any, kernel: Any, x: Tensor, hx: Any, weights: list[Tensor], batch_sizes: Any = ()
) -> tuple[Tensor, Any]:
    """Runs all layers as one op, with x and the outputs in the module's layout; returns outputs and h_n
    or (h_n, c_n)."""
    dtype = compute_dtype(x)
    tf32 = dtype is torch.float32 and precision(x) == "tf32"
    x = x if x.dtype is dtype else x.to(dtype)
    return _run_layers(module, kernel, cell_of(module), x, as_tuple(hx), weights, batch_sizes, tf32)


def _run_layers(
    module: Any, kernel: Any, cell: str, x: Tensor, states: tuple[Tensor, ...],
    weights: list[Tensor], batch_sizes: Any, tf32: bool, eager: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    directions, width = 2 if module.bidirectional else 1, module.hidden_size
    steps = len(batch_sizes) or x.shape[1 if module.batch_first else 0]
    dropout = float(module.dropout) if module.training and module.num_layers > 1 else 0.0
    # The kernels for one step take any width; the other engines are faster if it is padded.
    one_step = steps == 1 and directions == 1 and module.proj_size == 0 and dropout == 0
    if not one_step or weights[0].dtype is not x.dtype:
        rows = batch_sizes[0] if batch_sizes else x.shape[0 if module.batch_first else 1]
        width = padded_width(kernel.BACKEND, x.dtype, steps, width, rows, len(states) > 0)
    options = (
        batch_sizes, module.bias, module.proj_size > 0, directions, module.batch_first, width,
        dropout, tf32,
    )  # fmt: skip
    y, last = kernel.run_layers(cell, x, states, weights, options, eager)
    return y, tuple(last) if len(last) > 1 else last[0]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype to compute in."""
    kind = x.device.type
    if x.dtype is torch.float64 or not has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def precision(x: Tensor) -> str:
    if x.device.type != "cuda":
        return "highest"
    if torch.compiler.is_compiling():  # Dynamo knows the property only
        # Importing torch.backends.cudnn.rnn replaces it by an object with properties.
        switch: Any = torch.backends.cudnn.rnn
        return "tf32" if switch.fp32_precision == "tf32" else "highest"
    return "tf32" if recurrent_precision() == "tf32" else "highest"


def as_tuple(hx: Any) -> tuple[Tensor, ...]:
    if hx is None:
        return ()
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)
