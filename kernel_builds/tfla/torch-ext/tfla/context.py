"""Runs one long sequence on several devices: each runs its shard, and one state passes between
them.

    transfer = mlstm_transfer(k, v, i, f)                  on every device, at once
    state    = mlstm_carry(state, transfer)                from shard to shard, or as a tree of
    both     = mlstm_compose(first, second)                compositions: it is associative
    h, last  = mlstm(q, k, v, i, f, state)                 on every device, with its incoming state

The states are those of one call over the whole sequence, to rounding, and so are the gradients:
all four are differentiable.
"""

from typing import NamedTuple, Optional, Tuple

import torch

from .arguments import (
    STORED,
    check_carried,
    check_chunk_size,
    check_gate,
    check_inputs,
    check_sequences,
    check_transfer,
)
from .cells import Cell, pick_cell
from .checks import check_values
from .dispatch import BACKEND, select_backend
from .functional import run
from .memory import check_memory
from .reference import INF, Options, finite, log_gates
from .sequences import lower_masks, state_dtype


class Transfer(NamedTuple):
    """The effect of a shard on a state: a decay, and what the shard adds. S sequences."""

    C: torch.Tensor  # [S, H, K, V]
    n: Optional[torch.Tensor]  # [S, H, K]; None without a normaliser
    m: Optional[torch.Tensor]  # [S, H]; None for the sigmoid gate; -inf where nothing was added
    log_decay: torch.Tensor  # [S, H]; -inf where the shard has a reset


def mlstm_transfer(
    k, v, i, f, *, input_gate="exp", reset=None, hold=None, lengths=None, cu_seqlens=None,
    chunk_size=None, normalize=None, backend="auto",
) -> Transfer:  # fmt: skip
    """Returns the effect of the shard k [B, T, H, K], v [B, T, H, V], i, f [B, T, H] on any
    incoming state.

    Arguments and errors: as `mlstm`.
    """
    check_inputs(k, v, i, f, "B, T", 4)
    check_gate(input_gate, normalize, 0.0)
    check_chunk_size(chunk_size)
    cell, masks = pick_cell(input_gate, normalize), (reset, hold, lengths, cu_seqlens)
    S, _ = check_sequences(k, *masks)
    check_memory(STORED, None, k, v, i, f)
    check_values(k, lengths, cu_seqlens)
    chosen = select_backend(backend, k.device.type, BACKEND, k.dtype)
    nothing = absent_state(cell, S, k, v)
    _, last = run(chosen, None, k, v, i, f, nothing, masks, Options(cell), chunk_size)
    n = last[1] if cell.normalized else None
    m = last[-1] if cell.exponential else None
    return Transfer(last[0], n, m, log_decay(cell, i, f, k.dtype, masks))


def mlstm_carry(state: Tuple[torch.Tensor, ...], transfer: Transfer) -> Tuple[torch.Tensor, ...]:
    """Returns the state after a shard from the state before it. Wrong arguments raise as in
    `mlstm`."""
    check_transfer("transfer", transfer)
    check_carried("state", state, transfer, "transfer")
    return _carry(state, transfer)


def _carry(state: Tuple[torch.Tensor, ...], transfer: Transfer) -> Tuple[torch.Tensor, ...]:
    C, n, m, log_decay = transfer
    # Emptied by a reset: the old state must not matter, not even its NaN.
    emptied = log_decay == -INF
    state = tuple(s.masked_fill(emptied[(..., *[None] * (s.dim() - 2))], 0.0) for s in state)
    before = state[-1] if m is not None else torch.zeros_like(log_decay)
    added = torch.zeros_like(log_decay) if m is None else m
    after = torch.maximum(log_decay + before, added).detach() if m is not None else added
    keep = torch.exp(log_decay + before - finite(after))
    add = torch.exp(added - finite(after))
    carried = [keep[..., None, None] * state[0] + add[..., None, None] * C]
    if n is not None:
        carried.append(keep[..., None] * state[1] + add[..., None] * n)
    return (*carried, after) if m is not None else tuple(carried)


def mlstm_compose(first: Transfer, second: Transfer) -> Transfer:
    """Returns the transfer of `first` and then `second`. Wrong arguments raise as in `mlstm`."""
    check_transfer("first", first)
    check_transfer("second", second)
    first, second = Transfer(*first), Transfer(*second)
    state = tuple(s for s in first[:3] if s is not None)
    check_carried("first", state, second, "second")
    C, *others = _carry(state, second)
    n = others[0] if second.n is not None else None
    m = others[-1] if second.m is not None else None
    return Transfer(C, n, m, first.log_decay + second.log_decay)


def absent_state(cell: Cell, S: int, k: torch.Tensor, v: torch.Tensor):
    """Returns a state that adds nothing at any scale: m is -inf, where that of the empty state is
    0."""
    H, K = k.shape[2:]
    new = lambda value, *shape: torch.full(
        (S, H, *shape), value, dtype=state_dtype(k.dtype), device=k.device
    )
    n = (new(0.0, K),) if cell.normalized else ()
    m = (new(-INF),) if cell.exponential else ()
    return (new(0.0, K, v.shape[-1]), *n, *m)


def log_decay(cell: Cell, i, f, dtype: torch.dtype, masks) -> torch.Tensor:
    """Returns [S, H]: the sum of the log forget gates, or -inf if a reset cuts it."""
    rows = lower_masks(f, *masks)
    _, log_f = log_gates(cell, rows.x, rows.x, rows.hold)
    total = log_f.sum(1)
    if rows.reset is not None:
        total = total.masked_fill(rows.reset.any(1)[:, None], -INF)
    return total.to(state_dtype(dtype))
