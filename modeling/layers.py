"""Layers that own a cell's weights and call its kernel."""

from typing import Any, NamedTuple

import torch
from torch import nn

from .cache import RecurrentStateLayer
from .kernel_loader import load_kernel
from .kernels.fused_rnn.cells import CELLS


class Boundaries(NamedTuple):
    """Where sequences begin and where there is no sequence: the kernels' own arguments."""

    reset: torch.Tensor | None = None  # [B, T] bool: the state is emptied before this token
    hold: torch.Tensor | None = None  # [B, T] bool: padding, the state passes through
    cu_seqlens: torch.Tensor | None = None  # [S + 1] int: offsets of the documents of one row


NO_BOUNDARIES = Boundaries()


def find_boundaries(
    batch: int,
    length: int,
    attention_mask: torch.Tensor | None = None,  # [B, >= T], 0 = padding; the last T columns count
    position_ids: torch.Tensor | None = None,  # [B or 1, T], 0 = first token of a document
    cu_seq_lens: torch.Tensor | None = None,  # [S + 1]
    seq_idx: torch.Tensor | None = None,  # [B or 1, T], number of a token's document
) -> Boundaries:
    """Translates transformers' ways to say "padding" and "another document".

    Offsets say it all, so they win over `position_ids` and `seq_idx`, which are joined. Position 0
    of a padding token means nothing.
    """
    hold = reset = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or len(attention_mask) != batch:
            raise _shape_error("attention_mask", attention_mask, f"[{batch}, at least {length}]")
        if attention_mask.shape[1] < length:
            raise _shape_error("attention_mask", attention_mask, f"[{batch}, at least {length}]")
        hold = attention_mask[:, attention_mask.shape[1] - length :] == 0
    if cu_seq_lens is not None:
        if cu_seq_lens.dim() != 1 or batch != 1:
            had = f"cu_seq_lens_q has shape {list(cu_seq_lens.shape)} for a batch of {batch}"
            raise ValueError(f"{had}, but must have one dimension and the batch must be 1")
        return Boundaries(hold=hold, cu_seqlens=cu_seq_lens)
    for name, ids in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if ids is None:
            continue
        if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
            raise _shape_error(name, ids, f"[{batch} or 1, {length}]")
        first = ids == 0
        if name == "seq_idx":
            first = nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        first = first.expand(batch, length)
        reset = first if reset is None else reset | first
    if reset is not None and hold is not None:
        reset = reset & ~hold
    return Boundaries(reset, hold)


def _shape_error(name: str, value: torch.Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} has shape {list(value.shape)}, but must be {wanted}")


class RecurrentMixer(nn.Module):
    """A cell over time: projects the input to the gates and runs the recurrence of every head.

    The projection is an ordinary nn.Linear (LoRA, quantisation and sharding see it); the recurrent
    weight is not, and stays as it is.
    """

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.cell, heads, width = config.kernel_cell, config.num_heads, config.head_dim
        self.num_gates = CELLS[self.cell].gates
        self.in_proj = nn.Linear(
            config.hidden_size, self.num_gates * config.hidden_size, bias=False
        )
        self.recurrent_weight = nn.Parameter(torch.empty(self.num_gates, heads, width, width))
        self.gate_bias = nn.Parameter(torch.empty(CELLS[self.cell].bias_rows, heads, width))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        B, T, H = hidden_states.shape
        x = self.in_proj(hidden_states).view(B, T, self.num_gates, *self.gate_bias.shape[1:])
        kernel = load_kernel("fused-rnn", x.device.type, self.config.backend)
        weights = self.recurrent_weight, self.gate_bias
        packed = boundaries.cu_seqlens is not None  # every document begins here, none continues
        state = None if cache is None or packed else cache.get_states()
        if T == 1 and all(b is None for b in boundaries):
            h, state = kernel.recurrent_step(self.cell, x[:, 0], *weights, state)
        else:
            options = {**boundaries._asdict(), "grad_clip": self.config.grad_clip}
            h, state = kernel.recurrent(self.cell, x, *weights, state, **options)
        if cache is not None:
            cache.update_states(tuple(s[-1:] for s in state) if packed else state, T)
        return h.reshape(B, T, H)
