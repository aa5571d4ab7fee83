"""The time below which no version of a case can run on one H200: what scripts/bench_ops divides by.

A step waits for the one before it. What it cannot avoid is a chain of latencies, measured on the
chip by notes/prototypes of this project (one H200, SM clock 1.8 to 1.98 GHz):

    product     mma.sync of one tile's share, or its chain of dependent ones if that is longer
    cell        a sigmoid, two tanh, and the way of h through shared memory back into operands
    exchange    where a head's weight does not fit one SM: an all-gather of h among its blocks

Columns of the batch never meet, so a head is shared by as many groups of blocks as fit the chip,
each with a tile of 8 columns of the batch or several. The bytes of a pass at the bandwidth of
memory are a second floor, and the large products before and after the walk come on top.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

BANDWIDTH = 4.3e12  # bytes/s, copy on the device, read plus written
RATE = {"bfloat16": 790e12, "float16": 790e12, "tf32": 395e12, "float32": 60e12}  # FLOP/s
SMS = 132
SM_WEIGHT = (128 + 180) * 1024  # bytes of a weight that one SM keeps: registers, shared memory
MMA_CHAIN = 13.8e-9  # s, one m16n8k16 that needs the one before
MMA_ISSUE = 3.4e-9  # s, one m16n8k16 of many on one of the SM's four tensor cores
WARPS = 8  # that share the depth of a product
CELL = 33e-9 + 2 * 8.6e-9 + 38.8e-9  # s, sigmoid, tanh twice, st.shared + barrier + ldmatrix
EXCHANGE = 0.35e-6  # s, an all-gather of h: 0.60 us for 8 KB, 1.10 for 24, 2.19 for 64 ...
EXCHANGE_BYTE = 0.030e-6 / 1024  # ... which is this much a byte


class Walk(NamedTuple):
    """What a recurrence is to the chip."""

    gates: int
    heads: int  # that run at once: also directions, and the layers of a wavefront
    width: int
    batch: int
    steps: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype in ("bfloat16", "float16") else 4


def step_seconds(walk: Walk) -> float:
    """One step of the forward, or of the backward, whose product has the same size."""
    weight = walk.gates * walk.width**2 * walk.itemsize
    blocks = ceil(weight / SM_WEIGHT)  # at least, to hold one head's weight
    tiles = walk.heads * ceil(walk.batch / 8)
    groups = max(1, min(tiles, SMS // blocks))
    columns = ceil(tiles / groups)  # tiles of 8 that a group computes
    if walk.width > 128:
        blocks = max(blocks, SMS // groups)
    scale = walk.itemsize / 2  # tf32's m16n8k8 is half of a tile of 16 bit at the same cost
    products = walk.gates * walk.width**2 / 256 * columns / blocks * scale
    depth = walk.width / 16 * scale / (WARPS if blocks > 1 else 1)
    seconds = max(products / 4 * MMA_ISSUE, depth * MMA_CHAIN) + CELL
    if blocks > 1:
        rows = min(8 * columns, walk.batch)
        seconds += EXCHANGE + walk.width * rows * walk.itemsize * EXCHANGE_BYTE
    return seconds


def floor_seconds(walk: Walk, walks: int, bytes_moved: float, flops: float) -> float:
    """`walks` walks over the time that move `bytes_moved`, and `flops` in products beside them."""
    latency = walks * walk.steps * step_seconds(walk)
    return max(latency, bytes_moved / BANDWIDTH) + flops / RATE[walk.dtype]
