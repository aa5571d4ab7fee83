"""diagonal_rnn: recurrent cells whose channels do not mix (FlashGRU, FlashLSTM), and linear scans."""

from .cells import CELLS
from .conv import causal_conv
from .dispatch import BACKEND
from .functional import Info, flash_gru, flash_gru_step, flash_lstm, flash_lstm_step
from .mixer_step import conv_step, mixer_step
from .projection import headwise_linear, headwise_product
from .scans import block_scan, linear_scan
from .solve import ParallelRNN, SolveInfo, solve
from .structures import Structure, register_structure

if BACKEND is not None:
    from . import autograd  # noqa: F401  (registers fakes and gradients of the binary's ops)

__all__ = [
    "BACKEND",
    "CELLS",
    "Info",
    "ParallelRNN",
    "SolveInfo",
    "Structure",
    "block_scan",
    "causal_conv",
    "conv_step",
    "flash_gru",
    "flash_gru_step",
    "flash_lstm",
    "flash_lstm_step",
    "headwise_linear",
    "headwise_product",
    "linear_scan",
    "mixer_step",
    "register_structure",
    "solve",
]
