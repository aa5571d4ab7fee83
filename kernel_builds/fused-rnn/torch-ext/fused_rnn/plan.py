"""Which CUDA engine runs a call, with which tiles, and which limit decided: csrc/cuda/plan.h in Python.

Sizes: S sequences, T steps, N heads of width D, G gates, e bytes of an element. Pure functions of
sizes and of the GPU; nothing here touches a device. The constants are those the binary is built
from (csrc/cuda/tiles.h and tiles.py, both written by scripts/plan_tiles).
"""

import re
from typing import List, NamedTuple, Tuple

from .cells import Cell
from .dispatch import shown
from .tiles import BLOCK, GRID

LANES, COLUMNS, VECTOR = 32, 8, 16  # of a warp; sequences of a matrix instruction; bytes of a load
CHUNK_BYTES = 64  # of the depth: a vector for each of the four lanes of a row
CLUSTER_UNITS = 32  # of a thread block of the cluster engine
TALL_UNITS, TALL_BLOCKS = 24, 3  # of a tall thread block of the grid engine, and of its depth
COLUMN_BYTES, CELL_WARPS = 32, 4  # struct Column; warps that run the cell of a tile
THREAD_REGISTERS, BLOCK_REGISTERS, BLOCK_THREADS = 255, 65536, 1024


class Code(NamedTuple):
    """What kernels were compiled for: code for 8.0 lacks what 9.0 added, also on a GPU of 9.0."""

    arch: int  # 90 for compute capability 9.0
    sm_90a: bool = False  # has the instructions of 9.0 alone: compiled for 9.0a


class Device(NamedTuple):
    """What the plan needs to know of a GPU."""

    name: str
    arch: int  # 90 for compute capability 9.0
    code: Code  # that runs there
    sms: int
    shared_bytes: int  # a thread block may ask for


DEVICES = (  # the first of an arch stands for it; each with code of its own
    Device("A100", 80, Code(80), 108, 166912),
    Device("A40", 86, Code(86), 84, 101376),
    Device("RTX 3090", 86, Code(86), 82, 101376),
    Device("L40S", 89, Code(89), 142, 101376),
    Device("RTX 4090", 89, Code(89), 128, 101376),
    Device("H200", 90, Code(90, sm_90a=True), 132, 232448),
    Device("H100", 90, Code(90, sm_90a=True), 132, 232448),
    Device("B200", 100, Code(100), 148, 232448),
    Device("RTX 5090", 120, Code(120), 170, 101376),
)


class Limit(NamedTuple):
    """used <= limit, or the engine cannot run."""

    name: str
    used: int
    limit: int
    unit: str

    @property
    def holds(self) -> bool:
        return self.used <= self.limit

    def __str__(self) -> str:
        relation = "of" if self.holds else "but at most"
        return f"{self.name}: {self.used} {relation} {self.limit} {self.unit}"


class Shape(NamedTuple):
    """One pass of a cell: a product of row_tiles * 16 rows for 16 units, panels * D deep."""

    row_tiles: int
    panels: int
    inputs: int  # rows of 16 units that a step reads: x, or saved and dh
    states: int
    sums: int
    element: int  # bytes


class Problem(NamedTuple):
    """A call, as csrc/cuda/plan.h sees it."""

    S: int
    T: int
    N: int
    D: int
    gates: int
    io_bytes: int
    tf32: bool = False
    aligned: bool = True


def forward_shape(gates: int, states: int, element: int) -> Shape:
    """Every gate of 16 units, D deep."""
    return Shape(gates, 1, gates, states, 0, element)


def backward_shape(gates: int, states: int, saved: int, bias_rows: int, element: int) -> Shape:
    """16 units of the transposed weight, G D deep."""
    return Shape(1, gates, saved + 1, states, bias_rows, element)


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


def held_chunks(s: Shape) -> int:
    """Chunks whose weights stay in registers: two matrix instructions of four words for a tile."""
    return GRID["held"] // 8 // s.row_tiles


def max_blocks(s: Shape) -> int:
    """Blocks of the depth that the kernel is unrolled for."""
    return min(GRID["blocks"], GRID["chunks"] // (s.row_tiles * s.panels))


def blocks_of_depth(s: Shape, D: int) -> int:
    """A block of the depth is one chunk of every panel for every warp."""
    return divide_up(D * s.element, GRID["warps"] * CHUNK_BYTES)


def column_floats(row_tiles: int) -> int:
    """Partial sums of 16 units of a column: a slot of all row tiles for each, padded to all banks."""
    slot = 4 if row_tiles == 3 else row_tiles
    return slot * (17 if slot == 4 else 16 + 4 // slot)


def grid_shared_bytes(s: Shape, D: int) -> int:
    """Shared memory of a thread block of the grid engine, in bytes."""
    units, tiles, stages, warps = (GRID[k] for k in ("units", "tiles", "stages", "warps"))
    partials = 2 * warps * COLUMNS * column_floats(s.row_tiles) * 4
    ring = stages * s.inputs * COLUMNS * units * s.element
    carried = tiles * (s.states + s.sums) * COLUMNS * units * 4
    columns = tiles * (COLUMNS * COLUMN_BYTES + 4 + 4 * CELL_WARPS) + 64
    spilt = max(0, blocks_of_depth(s, D) * s.panels - held_chunks(s))
    return partials + ring + carried + columns + spilt * s.row_tiles * 2 * 16 * LANES * warps


def grid_limits(s: Shape, D: int, device: Device, direction: str = "") -> List[Limit]:
    """What a head of width D asks of the grid engine in one pass."""
    return [
        Limit("row in whole vectors, bytes over", D * s.element % VECTOR, 0, "bytes"),
        Limit("thread blocks at once", divide_up(D, GRID["units"]), device.sms,
              "SMs"),
        Limit(f"{direction} depth unrolled".strip(), blocks_of_depth(s, D), max_blocks(s),
              "blocks of depth"),
        Limit(f"{direction} shared memory".strip(), grid_shared_bytes(s, D), device.shared_bytes,
              "bytes"),
    ]  # fmt: skip


def grid_limits_of_every_cell(gates: int, element: int, D: int, device: Device) -> List[Limit]:
    """Both passes: no cell has more than 4 states and bias rows and 7 saved values."""
    forward, backward = forward_shape(gates, 4, element), backward_shape(gates, 4, 7, 4, element)
    both = grid_limits(forward, D, device, "forward") + grid_limits(backward, D, device, "backward")
    return list(dict.fromkeys(both))


def takes_wide_tiles(S: int, N: int, D: int, device: Device, backward: bool) -> bool:
    """Tiles of sixteen sequences, where the grid kernels that have them can run the head."""
    groups = max(1, device.sms // (N * divide_up(D, GRID["units"])))
    return device.code.sm_90a and divide_up(S, COLUMNS) > (4 if backward else 3) * groups


def takes_tall_blocks(p: Problem, device: Device) -> bool:
    """Thread blocks of 24 units, where they make more groups; the grid kernels of four gates."""
    groups = device.sms // (p.N * divide_up(p.D, GRID["units"]))
    more = device.sms // (p.N * divide_up(p.D, TALL_UNITS))
    depth = divide_up(p.D * p.io_bytes, GRID["warps"] * CHUNK_BYTES)
    return (
        device.code.sm_90a
        and p.io_bytes == 2
        and depth == TALL_BLOCKS
        and more > groups
        and divide_up(p.S, COLUMNS) > 2 * max(1, groups)
    )


def block_width(D: int, element: int) -> int:
    """The width that the block engine is compiled for: 32, 64 or 128."""
    return next(w for w in (32, 64, 128, 256, D) if w >= D)


def block_shared_bytes(cell: Cell, D: int, element: int, direction: str) -> int:
    """Shared memory of a thread block of the block engine: operand, ring of inputs, outbox."""
    width, vector = block_width(D, element), VECTOR // element
    row = (width + vector) * element * COLUMNS
    if direction == "forward":
        operand, inputs, outputs = 2 * row, cell.gates, cell.saved + 2
    else:
        operand = 2 * (cell.gates * width + vector) * element * COLUMNS
        split = cell.bias_rows > cell.gates  # dr differs from dx
        inputs, outputs = cell.saved + 1, cell.gates * (2 if split else 1)
    return operand + block_stages(inputs * row) * inputs * row + 2 * outputs * row


def block_stages(stage_bytes: int) -> int:
    """Steps of the inputs' ring."""
    for stages in (BLOCK["stages"], BLOCK["few_stages"]):
        if stage_bytes * stages <= BLOCK["ring_bytes"]:
            return stages
    return BLOCK["least_stages"]


def block_tile(p: Problem, device: Device) -> int:
    """Sequences of a thread block of the block engine."""
    return 4 if p.N * divide_up(p.S, 4) <= device.sms else 8


def select_engine(p: Problem, device: Device) -> Tuple[str, List[Limit]]:
    """The engine ("block", "cluster", "grid" or "step"), and what kept faster ones from the call."""
    matrix = p.io_bytes == 2 or p.tf32
    general = [
        Limit("steps less than two", int(p.T <= 1), 0, ""),
        Limit("row in whole vectors, bytes over", p.D * p.io_bytes % VECTOR, 0, "bytes"),
        Limit("x not aligned to 16 bytes", int(not p.aligned), 0, ""),
        Limit("exact fp32, which no matrix instruction has", int(not matrix), 0, ""),
    ]
    broken = [limit for limit in general if not limit.holds]
    if broken:
        return "step", broken
    fits_block = Limit("row of the weight in registers", p.D * p.io_bytes, BLOCK["row_bytes"],
                       "bytes")  # fmt: skip
    if fits_block.holds:
        return "block", []
    broken = [limit for limit in cluster_limits(p, device) if not limit.holds]
    if not broken:
        return "cluster", [fits_block]
    refused = [fits_block, *broken]
    limits = grid_limits_of_every_cell(p.gates, p.io_bytes, p.D, device)
    broken = [limit for limit in limits if not limit.holds]
    return ("step", [*refused, *broken]) if broken else ("grid", refused)


def cluster_members(D: int) -> int:
    """Thread blocks of a cluster."""
    return divide_up(D, CLUSTER_UNITS)


def clusters_at_once(D: int, device: Device) -> int:
    """A block to an SM, a cluster to a part of the GPU of 16 to 18 SMs."""
    return device.sms // 18 * (16 // cluster_members(D))


def cluster_limits(p: Problem, device: Device) -> List[Limit]:
    """What a call asks of the cluster engine, less what every engine with matrices asks."""
    most = 0 if device.code.arch < 90 else 16 if device.arch < 120 else 8
    limits = [
        Limit("bytes of an element", p.io_bytes, 2, "bytes"),
        Limit("thread blocks of a cluster", cluster_members(p.D), most, "blocks"),
    ]
    if p.D > 256 and limits[1].holds:
        wanted = p.N * divide_up(p.S, COLUMNS)
        limits.append(Limit("clusters at once", wanted, clusters_at_once(p.D, device), "clusters"))
    return limits


def cluster_tile(p: Problem, device: Device) -> int:
    """Sequences of a cluster."""
    by_four, by_eight = p.N * divide_up(p.S, 4), p.N * divide_up(p.S, 8)
    return 4 if by_four <= clusters_at_once(p.D, device) or by_four == by_eight else 8


def cluster_shared_bytes(cell: Cell, D: int, tile: int, direction: str) -> int:
    """Shared memory of a thread block of the cluster engine: exchange, ring of inputs, outbox."""
    depth, row = 256 if D <= 256 else 512, (CLUSTER_UNITS + 8) * 2 * COLUMNS
    if direction == "forward":
        partials = 4 * divide_up(cell.gates, 2) * LANES * 16 if depth > 256 else 0
        exchange = 2 * depth * tile * 2 + partials
        inputs, outputs = cell.gates, cell.saved + 2
    else:
        parts = 2 * (depth // CLUSTER_UNITS) * CLUSTER_UNITS * tile * 4
        exchange = parts + 2 * cell.gates * CLUSTER_UNITS * COLUMNS * 2
        split = cell.bias_rows > cell.gates  # dr differs from dx
        inputs, outputs = cell.saved + 1, cell.gates * (2 if split else 1)
    return exchange + 16 + block_stages(inputs * row) * inputs * row + 2 * outputs * row


def find_device(arch: object) -> Device:
    """'sm_90a', '9.0a', 90 or a GPU's name ('H200', 'NVIDIA A40') -> the device."""
    text = arch.strip() if isinstance(arch, str) else shown(arch)
    digits = text.lower().replace("sm_", "").replace("+ptx", "").replace(".", "").rstrip("af")
    for device in DEVICES:
        if digits == str(device.arch) or device.name.lower() in text.lower():
            return device
    known = sorted({f"sm_{d.arch}" for d in DEVICES}) + [d.name for d in DEVICES]
    raise ValueError(f"arch is {shown(arch)}, but must be one of {', '.join(known)}")


def with_code(device: Device, code: str) -> Device:
    """The device under a library that has no code of its own for it, but runs there: '8.0' on an H200."""
    match = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", code) if isinstance(code, str) else None
    if match is not None:
        major, minor, specific, _ = match.groups()
        built = Code(int(major + minor), sm_90a=(major, minor, specific) == ("9", "0", "a"))
        if built.arch == device.arch or (built.arch < device.arch and not specific):
            return device._replace(code=built)
    raise ValueError(f"code is {shown(code)}, but must be an arch that {device.name} runs: '8.0'")
