"""Defines the cells as data: sizes and equations, each written once. Other implementations are
tested against them.

A step takes the pre-activations ``x[g]``, the weight rows ``w[p]`` and the states ``s[k]``, every
tensor [B, D] (a row [D]) in the state dtype, and returns the next states, ``h`` first. No channel
sees another. Each C++ cell of the same name (csrc/cells/) declares the same sizes.
"""

from typing import Callable, Dict, NamedTuple, Tuple

import torch

Tensors = Tuple[torch.Tensor, ...]


class Cell(NamedTuple):
    """The sizes of a cell that an engine needs, and its equations as a function."""

    name: str
    gates: int  # G: rows of x
    weights: int  # P: rows of the weight, one number for each channel
    states: int  # K: h first
    step: Callable[[Tensors, Tensors, Tensors], Tensors]


CELLS: Dict[str, Cell] = {}


def cell(gates: int, weights: int, states: int):
    """Registers a step function as the cell of the same name."""

    def register(step: Callable[[Tensors, Tensors, Tensors], Tensors]) -> Callable:
        name = step.__name__
        CELLS[name] = Cell(name, gates, weights, states, step)
        return step

    return register


@cell(gates=3, weights=3, states=1)
def flash_gru(x: Tensors, w: Tensors, s: Tensors) -> Tensors:
    """z, r = sigmoid(a h + x), c = tanh(a_c (h r) + x_c);  h' = (1 - z) h + z c.  Rows z, r, c."""
    (h,) = s
    z, r = (torch.sigmoid(w[k] * h + x[k]) for k in range(2))
    c = torch.tanh(w[2] * (h * r) + x[2])
    return ((1 - z) * h + z * c,)


@cell(gates=3, weights=5, states=2)
def flash_lstm(x: Tensors, w: Tensors, s: Tensors) -> Tensors:
    """Coupled input and forget gate, two peepholes; rows f, o, z of x and a, then p_f, p_o.

    f = sigmoid(a_f h + p_f c + x_f), z = tanh(a_z h + x_z);  c' = f c + (1 - f) z
    o = sigmoid(a_o h + p_o c' + x_o);  h' = o tanh(c')
    """
    h, c = s
    f = torch.sigmoid(w[0] * h + w[3] * c + x[0])
    z = torch.tanh(w[2] * h + x[2])
    c = f * c + (1 - f) * z
    o = torch.sigmoid(w[1] * h + w[4] * c + x[1])
    return o * torch.tanh(c), c
