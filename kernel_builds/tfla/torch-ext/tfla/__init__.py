"""tfla: mLSTM with an exponential or sigmoid input gate, chunkwise, as in Tiled Flash Linear
Attention."""

from .cells import CELLS
from .context import Transfer, mlstm_carry, mlstm_compose, mlstm_transfer
from .dispatch import BACKEND
from .functional import mlstm, mlstm_step
from .linear import gate_step, linear_step, norm_step
from .replay import Ring, mlstm_fold, mlstm_replay_step, mlstm_ring

if BACKEND is not None:
    from . import autograd  # noqa: F401  (registers fakes and gradients of the binary's ops)

__all__ = [
    "BACKEND",
    "CELLS",
    "Ring",
    "Transfer",
    "gate_step",
    "linear_step",
    "mlstm",
    "mlstm_carry",
    "mlstm_compose",
    "mlstm_fold",
    "mlstm_replay_step",
    "mlstm_ring",
    "mlstm_step",
    "mlstm_transfer",
    "norm_step",
]
