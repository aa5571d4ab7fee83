"""Where sequences lie in a tensor x [B, T, ...], and how a PackedSequence becomes one.

Each sequence has a row of its own, where the steps after its end are padding; or all are documents in
one row, [1, total, ...], with nothing between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# On CUDA, an engine with a launch a step has as many launches as x has steps, and one row of documents
# has as many as all of them together. So each gets a row, unless too much of it would be padding.
ROW_DEVICES = ("cuda",)
MOST_PADDED = 4  # steps of the rows for each step of a sequence


class Layout(NamedTuple):
    """Offsets or lengths of the sequences, where they have any."""

    cu_seqlens: Tensor | None = None  # [S + 1], of documents in one row
    lengths: Tensor | None = None  # [B], of rows
    backwards: Tensor | None = (
        None  # [B * T]: the place of each step when its sequence runs backwards
    )

    @property
    def is_ragged(self) -> bool:
        return self.backwards is not None

    def flip(self, x: Tensor) -> Tensor:
        """The steps of every sequence in the opposite order; padding stays where it is."""
        if self.backwards is None:
            return x.flip(1)
        return put_rows(x.flatten(0, 1), self.backwards).view(x.shape)

    def first(self) -> tuple[Any, ...]:
        """Index of the first steps in [N, B, T, ...]."""
        if self.cu_seqlens is None:
            return slice(None), slice(None), 0
        return slice(None), 0, self.cu_seqlens[:-1]


class Packed(NamedTuple):
    """A PackedSequence's rows, all first steps first, as sequences in `layout`, and back."""

    layout: Layout
    places: Tensor  # [total]: of each packed row in x [B * T, ...]
    inverse: Tensor | None  # [total]: the way back, where x has no padding
    shape: tuple[int, int]  # B, T

    def unpack(self, data: Tensor) -> Tensor:
        """[total, I] -> x [B, T, I], with zeros as padding."""
        if self.inverse is not None:
            return put_rows(data, self.places).unsqueeze(0)
        B, T = self.shape
        x = data.new_zeros(B * T, data.shape[-1])
        return x.index_copy(0, self.places, data).view(B, T, -1)

    def pack(self, y: Tensor) -> Tensor:
        """y [B, T, P] -> [total, P]."""
        rows = y.flatten(0, 1)
        return rows[self.places] if self.inverse is None else put_rows(rows, self.inverse)


def describe(batch_sizes: Tensor, device: torch.device) -> Packed:
    """The way of a PackedSequence with these batch sizes into x and back.

    All indices are computed on the CPU, where batch_sizes is, and moved at once: the host never waits
    for the device. PackedSequences have no empty sequences."""
    cpu = batch_sizes.device
    T, B = len(batch_sizes), int(batch_sizes[0])
    steps = torch.arange(T, device=cpu).repeat_interleave(batch_sizes)
    total = len(steps)
    rows = torch.arange(total, device=cpu)
    begins = batch_sizes.cumsum(0) - batch_sizes
    documents = rows - begins.repeat_interleave(batch_sizes)  # the one each packed row belongs to
    lengths = documents.bincount()
    if device.type in ROW_DEVICES and MOST_PADDED * total >= B * T:
        places = documents * T + steps
        backwards = torch.arange(B * T, device=cpu)
        backwards[places] = documents * T + lengths[documents] - 1 - steps
        parts = _move((places, backwards, lengths), device)
        return Packed(Layout(None, parts[2], parts[1]), parts[0], None, (B, T))
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    places = cu_seqlens[documents] + steps
    inverse = torch.empty_like(rows).index_copy_(0, places, rows)
    backwards = (cu_seqlens[:-1] + cu_seqlens[1:] - 1).repeat_interleave(lengths) - rows
    parts = _move((places, inverse, backwards, cu_seqlens), device)
    return Packed(Layout(parts[3], None, parts[2]), parts[0], parts[1], (1, total))


def _move(indices: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    joined = torch.cat(indices)
    if device.type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split([len(index) for index in indices])


def put_rows(x: Tensor, places: Tensor) -> Tensor:
    """y[places] = x, a permutation: written, not gathered, because then the gradient gathers."""
    return torch.empty_like(x).index_copy_(0, places, x)
