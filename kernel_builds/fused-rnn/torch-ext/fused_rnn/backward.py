"""Runs a cell's backward op, and the product that it may leave to cuBLAS."""

from typing import Any, NamedTuple, Optional, Tuple

import torch

from .cells import Cell
from .dispatch import without_autocast
from .formulas import CALLS

# dweight[g, n, j, k] = sum over b, t of dr[b, t, g, n, j] h_prev[b, t, n, k]. On CUDA our own kernel
# computes several narrow heads in one launch. cuBLAS is faster for one head, which is one product, and
# for wide heads.
WIDEST_OWN_DWEIGHT, LEAST_OWN_HEADS = 256, 2


class Clips(NamedTuple):
    gradient: Optional[float]  # grad_clip
    state: Optional[float]  # clip_state


def wide_dweight(dr: torch.Tensor, h_prev: torch.Tensor, tf32: bool) -> torch.Tensor:
    """dweight by cuBLAS: dr [B, T, G, N, D], h_prev [B, T, N, D] -> [G, N, D, D]."""
    G, N, D = dr.shape[2:]
    dr, h_prev = dr.flatten(0, 1), h_prev.flatten(0, 1)
    rounds = tf32 and dr.dtype == torch.float32
    if N == 1:  # the gates are one product
        left, right = dr.flatten(1).mT, h_prev.flatten(1)
        found = CALLS["tf32_matmul"](left[None], right[None]) if rounds else left @ right
        return found.view(G, 1, D, D)
    if not rounds:
        return torch.einsum("rgnj,rnk->gnjk", dr, h_prev)
    gates, previous = dr.permute(1, 2, 3, 0), h_prev.transpose(0, 1)  # [G, N, D, rows]
    return torch.stack([CALLS["tf32_matmul"](gate, previous) for gate in gates])


def gradients(
    cell: Cell, given: Tuple[Any, ...], clips: Clips, tf32: bool, wants_dweight: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns dx, dweight, dbias and dstate. `given`: dh, dlast, what the forward kept, weight, and
    the masks."""
    h_prev, weight = given[3], given[4]
    N, D = weight.shape[1:3]
    is_own = weight.device.type != "cuda" or (D <= WIDEST_OWN_DWEIGHT and N >= LEAST_OWN_HEADS)
    own = wants_dweight and is_own
    bwd, state = CALLS[f"{cell.name}_bwd"], () if clips.state is None else (clips.state,)
    dx, dr, dbias, dstate, dweight = bwd(*given, clips.gradient, tf32, own, *state)
    if wants_dweight and not own:
        with without_autocast(weight.device.type):
            dweight = wide_dweight(dr if dr.dim() == 5 else dx, h_prev, tf32)
    return dx, dweight if wants_dweight else None, dbias, dstate
