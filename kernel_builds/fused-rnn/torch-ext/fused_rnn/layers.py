"""Layers for `kernels.kernelize`: torch.nn's recurrent modules, run by this kernel.

    from kernels import Mode, kernelize, replace_kernel_forward_from_hub

    replace_kernel_forward_from_hub(torch.nn.LSTM, "LSTM")  # once, before kernelize
    model = kernelize(model, mode=Mode.TRAINING, device="cuda")  # with a mapping LSTM -> this repo

By the rules of `kernels` a layer has a forward and nothing else; the parameters and the checks are
those of the torch.nn module that it is bound to.
"""

from types import SimpleNamespace

from torch import nn

from .cell_op import run_step
from .cells import CELLS
from .dispatch import BACKEND
from .forward import run_cell, run_sequence
from .functional import linear, recurrent, recurrent_step
from .layers_op import run_layers

KERNEL = SimpleNamespace(
    BACKEND=BACKEND,
    CELLS=CELLS,
    linear=linear,
    recurrent=recurrent,
    recurrent_step=recurrent_step,
    run_step=run_step,
    run_layers=run_layers,
)


class LSTM(nn.Module):
    """Forward of torch.nn.LSTM."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_sequence(self, KERNEL, input, hx)


class GRU(nn.Module):
    """Forward of torch.nn.GRU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_sequence(self, KERNEL, input, hx)


class RNN(nn.Module):
    """Forward of torch.nn.RNN."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_sequence(self, KERNEL, input, hx)


class LSTMCell(nn.Module):
    """Forward of torch.nn.LSTMCell."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_cell(self, KERNEL, "lstm", input, hx)


class GRUCell(nn.Module):
    """Forward of torch.nn.GRUCell."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_cell(self, KERNEL, "gru", input, hx)


class RNNCell(nn.Module):
    """Forward of torch.nn.RNNCell."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input, hx=None):
        return run_cell(self, KERNEL, f"rnn_{self.nonlinearity}", input, hx)
