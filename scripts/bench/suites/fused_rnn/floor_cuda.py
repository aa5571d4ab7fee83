"""Computes a lower bound of a case's time on one H200, the floor in the tables of bench_ops.

Each step waits for the one before it, so its time is at least a chain of latencies. They were
measured by small test kernels on one H200 (SM clock 1.8 to 1.98 GHz):

    product     mma.sync of one tile's share, or its chain of dependent ones if that is longer
    cell        a sigmoid, two tanh, and the way of h through shared memory back into operands
    exchange    where a head's weight does not fit one SM: an all-gather of h among its blocks

Columns of the batch never meet, so a head is shared by as many groups of blocks as fit the GPU,
each with a tile of 8 columns of the batch or several. The bytes of a pass at the bandwidth of
memory are a second floor. The large products before and after the recurrence are added.
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
WARPS = 8  # warps that share the depth of a product
CELL = 33e-9 + 2 * 8.6e-9 + 38.8e-9  # s, sigmoid, tanh twice, st.shared + barrier + ldmatrix
EXCHANGE = 0.25e-6  # s, a word from one SM to another through L2, one way: 0.18 to 0.35 us ...
EXCHANGE_BYTE = 1 / 112e9  # s, ... and h of the whole head into an SM: 64 bytes a clock
CLUSTER_EXCHANGE = 0.19e-6  # s, one release and one acquire between thread blocks of a cluster
CLUSTER_BLOCKS = 16


class Recurrence(NamedTuple):
    """The shape of one recurrence, as it determines the floor."""

    gates: int
    heads: int  # recurrences at once: heads, directions, layers of a wavefront
    width: int
    batch: int
    steps: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype in ("bfloat16", "float16") else 4


def step_seconds(recurrence: Recurrence) -> float:
    """Returns the least time of one step, forward or backward."""
    weight = recurrence.gates * recurrence.width**2 * recurrence.itemsize
    blocks = ceil(weight / SM_WEIGHT)  # at least, to hold one head's weight
    tiles = recurrence.heads * ceil(recurrence.batch / 8)
    if blocks == 1 and recurrence.width <= 128:
        return work_seconds(recurrence, 1, ceil(tiles / SMS))
    groups = max(1, min(tiles, SMS // blocks))
    columns = ceil(tiles / groups)
    rows = min(8 * columns, recurrence.batch)
    grid = work_seconds(recurrence, max(blocks, SMS // groups), columns)
    grid += EXCHANGE + recurrence.width * rows * recurrence.itemsize * EXCHANGE_BYTE
    if blocks > CLUSTER_BLOCKS:
        return grid
    clusters = SMS // CLUSTER_BLOCKS
    cluster = work_seconds(recurrence, CLUSTER_BLOCKS, ceil(tiles / clusters)) + CLUSTER_EXCHANGE
    return min(grid, cluster)


def work_seconds(recurrence: Recurrence, blocks: int, columns: int) -> float:
    """Returns the time of a step's product and cell on `blocks` SMs for `columns` tiles of 8
    sequences."""
    scale = recurrence.itemsize / 2  # tf32's m16n8k8 is half of a tile of 16 bit at the same cost
    products = recurrence.gates * recurrence.width**2 / 256 * columns / blocks * scale
    depth = recurrence.width / 16 * scale / (WARPS if blocks > 1 else 1)
    return max(products / 4 * MMA_ISSUE, depth * MMA_CHAIN) + CELL


def floor_seconds(recurrence: Recurrence, passes: int, bytes_moved: float, flops: float) -> float:
    """Returns the floor of `passes` passes over time that move `bytes_moved`, plus `flops` of large
    products."""
    latency = passes * recurrence.steps * step_seconds(recurrence)
    return max(latency, bytes_moved / BANDWIDTH) + flops / RATE[recurrence.dtype]
