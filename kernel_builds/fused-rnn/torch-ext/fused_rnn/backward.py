"""Runs a cell's backward op, and the product that it may leave to cuBLAS."""

from typing import Any, NamedTuple, Optional, Tuple

import torch

from .cells import Cell
from .formulas import CALLS

# dweight[g, n, j, k] = sum over b, t of dr[b, t, g, n, j] h_prev[b, t, n, k]. For wide heads on
# CUDA this is one large product per head, which cuBLAS does best. For narrow heads it is tall and
# thin, and our own kernel is faster.
WIDEST_OWN_DWEIGHT = 256


class Clips(NamedTuple):
    gradient: Optional[float]  # grad_clip
    state: Optional[float]  # clip_state


def wide_dweight(dr: torch.Tensor, h_prev: torch.Tensor, tf32: bool) -> torch.Tensor:
    """dweight of wide heads: dr [B, T, G, N, D], h_prev [B, T, N, D] -> [G, N, D, D]."""
    if not tf32 or dr.dtype != torch.float32:
        return torch.einsum("btgnj,btnk->gnjk", dr, h_prev)
    G, N, D = dr.shape[2:]
    previous = h_prev.flatten(0, 1).transpose(0, 1)  # [N, rows, D]
    if N == 1:
        rows = dr.reshape(1, -1, G * D).mT
        return CALLS["tf32_matmul"](rows, previous).view(G, 1, D, D)
    gates = dr.flatten(0, 1).permute(1, 2, 3, 0)  # [G, N, D, rows]
    return torch.stack([CALLS["tf32_matmul"](gate, previous) for gate in gates])


def gradients(
    cell: Cell, given: Tuple[Any, ...], clips: Clips, tf32: bool, wants_dweight: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns dx, dweight, dbias and dstate. `given`: dh, dlast, what the forward kept, weight, and
    the masks."""
    h_prev, weight = given[3], given[4]
    own = wants_dweight and (weight.device.type != "cuda" or weight.shape[-1] <= WIDEST_OWN_DWEIGHT)
    bwd, state = CALLS[f"{cell.name}_bwd"], () if clips.state is None else (clips.state,)
    dx, dr, dbias, dstate, dweight = bwd(*given, clips.gradient, tf32, own, *state)
    if wants_dweight and not own:
        dweight = wide_dweight(dr if dr.dim() == 5 else dx, h_prev, tf32)
    return dx, dweight if wants_dweight else None, dbias, dstate
