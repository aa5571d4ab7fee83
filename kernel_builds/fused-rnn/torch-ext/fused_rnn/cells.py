"""Defines the cells as data: sizes and equations, each written once. Other implementations are
tested against them.

A step takes the pre-activations ``x[g]`` (bias included), the recurrent products ``r[g]`` and the
states ``s[k]``, every tensor [B, N, D] in the state dtype, and returns the next states, ``h`` first.
A bounded cell also takes ``clip``, which bounds what the step adds up before anything reads it.
Each C++ cell of the same name (csrc/cells/) declares the same sizes.
"""

from typing import Callable, Dict, NamedTuple, Tuple

import torch
import torch.nn.functional as F

Tensors = Tuple[torch.Tensor, ...]


class Cell(NamedTuple):
    """The sizes of a cell that an engine needs, and its equations as a function."""

    name: str
    gates: int  # G: rows of x and weight
    states: int  # K: h first
    # R: G rows added to x; one more row, if any, is added to the last gate's recurrent product.
    bias_rows: int
    saved: int  # V: values a step keeps for its backward
    detached_states: int  # trailing states that carry no gradient (stabilisers)
    step: Callable[..., Tensors]
    bounded: bool  # whether the step takes `clip`


CELLS: Dict[str, Cell] = {}


def cell(
    gates: int, states: int, saved: int, extra_bias: int = 0, detached_states: int = 0,
    bounded: bool = False,
):  # fmt: skip
    """Registers a step function as the cell of the same name."""

    def register(step: Callable[..., Tensors]) -> Callable:
        name, rows = step.__name__, gates + extra_bias
        CELLS[name] = Cell(name, gates, states, rows, saved, detached_states, step, bounded)
        return step

    return register


def as_it_is(state: torch.Tensor) -> torch.Tensor:
    return state


@cell(gates=4, states=2, saved=5, bounded=True)
def lstm(x: Tensors, r: Tensors, s: Tensors, clip: Callable = as_it_is) -> Tensors:
    """i, f, o = sigmoid(x + r), g = tanh(x + r);  c' = f c + i g,  h' = o tanh(c')."""
    i, f, g, o = (x[k] + r[k] for k in range(4))
    c = clip(torch.sigmoid(f) * s[1] + torch.sigmoid(i) * torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c


@cell(gates=3, states=1, saved=5, extra_bias=1, bounded=True)
def gru(x: Tensors, r: Tensors, s: Tensors, clip: Callable = as_it_is) -> Tensors:
    """r, z = sigmoid(x + r), n = tanh(x_n + r * r_n) with r_n = R_n h + b_nh;  h' = (1-z) n + z h."""
    reset, z = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    n = torch.tanh(x[2] + reset * r[2])
    return (clip((1 - z) * n + z * s[0]),)


@cell(gates=1, states=1, saved=1, bounded=True)
def rnn_tanh(x: Tensors, r: Tensors, s: Tensors, clip: Callable = as_it_is) -> Tensors:
    """h' = tanh(x + r), Elman's cell."""
    return (clip(torch.tanh(x[0] + r[0])),)


@cell(gates=1, states=1, saved=1, bounded=True)
def rnn_relu(x: Tensors, r: Tensors, s: Tensors, clip: Callable = as_it_is) -> Tensors:
    """h' = max(x + r, 0)."""
    return (clip(torch.relu(x[0] + r[0])),)


@cell(gates=4, states=4, saved=7, detached_states=1)
def slstm(x: Tensors, r: Tensors, s: Tensors) -> Tensors:
    """sLSTM with the stabiliser m; a unit is empty where n = 0, and then m' = i.

    lf = logsigmoid(f) + m;  m' = i if n == 0 else max(i, lf)
    c' = e^(lf-m') c + e^(i-m') tanh(z),  n' = e^(lf-m') n + e^(i-m'),  h' = sigmoid(o) c'/n'

    m is a choice of scale: no gradient flows through it, and h does not depend on it.
    """
    i, f, z, o = (x[k] + r[k] for k in range(4))
    _, c, n, m = s
    empty = n == 0
    log_f = F.logsigmoid(f) + m.detach()
    m = torch.where(empty, i, torch.maximum(i, log_f)).detach()
    forget = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, log_f - m)))
    write = torch.exp(i - m)
    c, n = forget * c + write * torch.tanh(z), forget * n + write
    return torch.sigmoid(o) * c / n, c, n, m
