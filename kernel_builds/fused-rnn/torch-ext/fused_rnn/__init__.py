"""fused_rnn: recurrent cells that mix their state (LSTM, GRU, Elman, sLSTM) in fused kernels."""

from . import layers  # `kernels` looks for torch.nn's modules there
from .block_step import block_step
from .cell_op import run_step as run_step  # which torch.nn's stand-ins call, as they do run_layers
from .cells import CELLS
from .dispatch import BACKEND
from .explain import explain_layers, explain_plan
from .functional import (
    gru,
    gru_step,
    linear,
    lstm,
    lstm_step,
    recurrent,
    recurrent_step,
    rnn,
    rnn_step,
    slstm,
    slstm_step,
)
from .layers_op import run_layers as run_layers

if BACKEND is not None:
    from . import autograd, flops  # noqa: F401  (registers fakes, gradients and costs of the ops)

__all__ = [
    "BACKEND",
    "CELLS",
    "block_step",
    "explain_layers",
    "explain_plan",
    "gru",
    "gru_step",
    "layers",
    "linear",
    "lstm",
    "lstm_step",
    "recurrent",
    "recurrent_step",
    "rnn",
    "rnn_step",
    "slstm",
    "slstm_step",
]
