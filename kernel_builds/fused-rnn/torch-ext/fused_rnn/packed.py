"""Says where sequences lie in a tensor x [B, T, ...], and converts a PackedSequence to such a tensor.

Either each sequence has a row of its own, padded after its end, or all of them lie end to end in one
row, [1, total, ...].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Some CUDA engines launch a kernel for each of the T steps of x. In one row, T is the sum of all lengths;
# in padded rows it is the longest. So each sequence gets a row, unless too much would be padding.
ROW_DEVICES = ("cuda",)
MOST_PADDED = 4  # B * T may be this many times the sum of all lengths


class Layout(NamedTuple):
    """The sequences in x: all in one row, or a row each, padded or (without lengths) full."""

    cu_seqlens: Tensor | None = None  # [S + 1]: offsets of sequences in one row
    lengths: Tensor | None = None  # [B]: lengths of padded rows
    backwards: Tensor | None = None  # [B * T]: the place of each step once its sequence is reversed

    def flip(self, x: Tensor) -> Tensor:
        """Returns x with every sequence reversed in time; padding stays where it is."""
        if self.backwards is None:
            return x.flip(1)
        return put_rows(x.flatten(0, 1), self.backwards).view(x.shape)

    def first(self) -> tuple[Any, ...]:
        """Returns the index of the first step of every sequence in a tensor [N, B, T, ...]."""
        if self.cu_seqlens is None:
            return slice(None), slice(None), 0
        return slice(None), 0, self.cu_seqlens[:-1]


class Packed(NamedTuple):
    """Converts the data of a PackedSequence (first steps first) to an x of `layout`, and back."""

    layout: Layout
    places: Tensor  # [total]: where each row of the data goes in x [B * T, ...]
    inverse: Tensor | None  # [total]: the inverse of places; None if x has padding
    shape: tuple[int, int]  # B, T

    def unpack(self, data: Tensor) -> Tensor:
        """Converts data [total, I] to x [B, T, I], with zeros as padding."""
        if self.inverse is not None:
            return put_rows(data, self.places).unsqueeze(0)
        B, T = self.shape
        x = data.new_zeros(B * T, data.shape[-1])
        return x.index_copy(0, self.places, data).view(B, T, -1)

    def pack(self, y: Tensor) -> Tensor:
        """Converts y [B, T, P] to data [total, P]."""
        rows = y.flatten(0, 1)
        return (
            rows.index_select(0, self.places)
            if self.inverse is None
            else put_rows(rows, self.inverse)
        )


def fits_rows(total: int, T: int, B: int) -> bool:
    """Whether sequences of `total` steps may have a row each, of the longest's T steps."""
    return MOST_PADDED * total >= B * T


def describe(batch_sizes: Tensor, device: torch.device) -> Packed:
    """Returns how to convert a PackedSequence with these batch sizes to x and back.

    All indices are computed on the CPU, where batch_sizes is, and copied to the device in one piece, so
    that the host never waits for the device. A PackedSequence has no empty sequences."""
    cpu = batch_sizes.device
    T, B = len(batch_sizes), int(batch_sizes[0])
    steps = torch.arange(T, device=cpu).repeat_interleave(batch_sizes)
    total = len(steps)
    rows = torch.arange(total, device=cpu)
    begins = batch_sizes.cumsum(0) - batch_sizes
    documents = rows - begins.repeat_interleave(batch_sizes)  # the sequence of each row of the data
    lengths = documents.bincount()
    if device.type in ROW_DEVICES and fits_rows(total, T, B):
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
    """Returns y with y[places] = x, for a permutation. Its backward is a gather, not a scatter."""
    return torch.empty_like(x).index_copy_(0, places, x)
