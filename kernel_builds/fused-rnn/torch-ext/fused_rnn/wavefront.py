"""Layers that run side by side on CUDA, as csrc/stack/wavefront.h describes: the steps of a chunk, and
what the forward keeps."""

import os
from functools import lru_cache
from typing import Any, List, NamedTuple, Sequence

import torch

from .dispatch import ops

LEAST_STEPS = 16  # below, no number of chunks would pay


def chunk_of(
    cell: str, x: torch.Tensor, weights: Sequence[torch.Tensor], options: Any, saves: bool
) -> int:
    """Returns the steps of a chunk for a call of layers_op.run_layers, or 0 for one layer after the
    other. `saves`: whether a backward pass will follow."""
    batch_sizes, has_bias, projects, directions, batch_first, width, _, tf32 = options
    layers = len(weights) // (4 if has_bias else 2)
    if layers == 1 or directions == 2 or projects or batch_sizes or not x.is_cuda:
        return 0
    B, T = x.shape[0 if batch_first else 1], x.shape[1 if batch_first else 0]
    if T < LEAST_STEPS or B == 0 or os.environ.get("FLASHCELL_CUDA_ENGINE"):
        return 0
    return _plan(cell, layers, saves, B, T, width, x.element_size(), tf32, x.get_device())


@lru_cache(maxsize=4096)
def _plan(cell: str, layers: int, saves: bool, *problem_and_device: Any) -> int:
    *problem, device = problem_and_device
    with torch.cuda.device(device):
        return ops.plan_layers(cell, layers, saves, *problem)


class Sizes(NamedTuple):
    """L layers, B sequences, T steps, I inputs, P units with those of padding, G gates, V saved values."""

    L: int
    B: int
    T: int
    I: int
    P: int
    G: int
    V: int
    chunk: int  # steps


def kept_of_chunks(
    x: torch.Tensor, sizes: Sizes, dropout: float, packs: bool
) -> List[torch.Tensor]:
    """Returns tensors like those that the forward keeps. `packs`: whether the first layer's w_ih is
    padded or cast."""
    L, B, T, I, P, G, V, chunk = sizes
    rest, waves = B * (T % chunk), T // chunk + L - 1
    rows = rest + waves * B * chunk
    weights = aligned(G * L * P * P) + (L - 1) * aligned(G * P * P) + (G * P * I if packs else 0)
    kept = [
        x.new_empty(weights),
        x.new_empty(B * T, I),
        x.new_empty(rows, V, L, P),
        x.new_empty(rows, L, P),
        x.new_empty(rows, L, P),
    ]
    if dropout > 0:
        kept.append(x.new_empty(rows, L, P))
        counts = [rest] * (L - 1 if rest else 0) + [B * chunk] * (waves - 1)
        kept += [x.new_empty(count, L, P, dtype=torch.bool) for count in counts]
    return kept


def masks_of_chunks(
    kept: Sequence[torch.Tensor], L: int, B: int, T: int, D: int, chunk: int
) -> List[torch.Tensor]:
    """Returns the masks of all layers' outputs but the last one's, [B, T, D], from those that the forward
    keeps: of each layer's rest, and of each wave, in which layer l has chunk `wave - l`."""
    rest, chunks = T % chunk, T // chunk
    waves = kept[L - 1 if rest else 0 :]
    masks = []
    for layer in range(L - 1):
        parts = [kept[layer]] if rest else []
        parts += waves[layer : layer + chunks]
        units = (part[:, L - 1 - layer, :D] for part in parts)
        masks.append(torch.cat([part.reshape(B, -1, D) for part in units], 1))
    return masks


def aligned(elements: int) -> int:
    """Returns where the next weight begins, in elements, behind so many."""
    return (elements + 63) // 64 * 64
