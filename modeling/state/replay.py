"""The ring of an mLSTM layer in a recorded step: the last tokens of each row, which its state C
does not hold yet (tfla's replay.py). So C is written once in 16 tokens, and tokens are taken back
without copies. A recording keeps the ring beside its buffers; states that leave the buffers are
whole.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

# By device, the rows from which a ring pays: NOTEBOOK.md, "Tokens that a state does not hold yet".
ROWS = {"cuda": 8}


def pays(kernel: Any, q: torch.Tensor) -> bool:
    """Whether a step of q [B, 1, H, K] is faster with a ring."""
    kind = q.device.type
    return kind == kernel.BACKEND and q.shape[0] >= ROWS.get(kind, sys.maxsize)


class Replay:
    """The ring beside `state`, the buffers C [B, H, K, V], n and m; `options` are the step's."""

    def __init__(
        self, kernel: Any, state: tuple[torch.Tensor, ...], dtype: torch.dtype, options: Any
    ):
        self.state, self.ring = state, kernel.mlstm_ring(state[0], dtype)
        names = ("input_gate", "normalize", "backend")
        self._fold = partial(kernel.mlstm_fold, **{k: options[k] for k in names if k in options})

    def fold(self, rows: slice = slice(None)) -> None:
        """Folds the tokens of `rows` into their states."""
        self._fold([s[rows] for s in self.state], type(self.ring)(*(x[rows] for x in self.ring)))

    def empty(self, rows: Sequence[int]) -> None:
        """Forgets the tokens of `rows`, whose states are about to be overwritten."""
        for row in rows:
            self.ring.used[row].zero_()

    def take_back(self, tokens: int) -> bool:
        """Takes back the last tokens of all rows if they are all in the ring; returns whether."""
        if int(self.ring.used.min()) < tokens:
            return False
        self.ring.used.sub_(tokens)
        return True
