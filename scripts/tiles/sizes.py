"""What the constraint problem knows of the CUDA engines: their units, and the passes of the cells.

The kernels' own arithmetic is csrc/cuda/*/plan.h, which `tiles.planner` asks.
"""

from __future__ import annotations

from typing import NamedTuple

LANES, COLUMNS, VECTOR = 32, 8, 16  # of a warp; sequences of a matrix instruction; bytes of a load
CHUNK_BYTES = 64  # along the depth: a vector for each of the 4 lanes of a row
COLUMN_BYTES, CELL_WARPS = 32, 4  # struct Column; warps that run the cell of a tile
THREAD_REGISTERS, BLOCK_REGISTERS, BLOCK_THREADS = 255, 65536, 1024


class Shape(NamedTuple):
    """One pass of a cell: a product of row_tiles * 16 rows for 16 units, panels * D deep."""

    row_tiles: int
    panels: int
    inputs: int  # rows of 16 units that a step reads: x, or saved and dh
    states: int
    sums: int
    element: int  # bytes


def forward_shape(gates: int, states: int, element: int) -> Shape:
    """Every gate of 16 units, D deep."""
    return Shape(gates, 1, gates, states, 0, element)


def backward_shape(gates: int, states: int, saved: int, bias_rows: int, element: int) -> Shape:
    """Returns the shape of a backward pass: 16 units of the transposed weight, G D deep."""
    return Shape(1, gates, saved + 1, states, bias_rows, element)


def column_floats(row_tiles: int) -> int:
    """Partial sums of 16 units of a column: a slot of all row tiles for each, padded to all banks."""
    slot = 4 if row_tiles == 3 else row_tiles
    return slot * (17 if slot == 4 else 16 + 4 // slot)
