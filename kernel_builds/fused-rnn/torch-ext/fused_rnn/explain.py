"""What runs a call on CUDA, in words: the engine of plan.py, its grid and memory, and what decided."""

from typing import Dict, List, NamedTuple, Optional

import torch

from .cells import CELLS
from .checks import check_choice, check_whole, find_cell
from .dispatch import shown
from .plan import (
    CLUSTER_UNITS,
    COLUMNS,
    TALL_UNITS,
    Device,
    Limit,
    Problem,
    backward_shape,
    block_shared_bytes,
    block_tile,
    block_width,
    blocks_of_depth,
    cluster_limits,
    cluster_members,
    cluster_shared_bytes,
    cluster_tile,
    divide_up,
    find_device,
    forward_shape,
    grid_limits,
    held_chunks,
    select_engine,
    takes_tall_blocks,
    takes_wide_tiles,
    with_code,
)
from .tiles import GRID, REGISTERS


class Plan(NamedTuple):
    """A call's engine, its tiles and what they take; prints as a few lines."""

    engine: str
    device: Device
    what: str
    tiles: Dict[str, str]
    limits: List[Limit]  # of the engine chosen
    refused: List[Limit]  # that kept faster engines from it

    @property
    def binding(self) -> Optional[Limit]:
        """The limit with the least room."""
        return max(self.limits, key=lambda x: x.used / max(1, x.limit), default=None)

    def __repr__(self) -> str:
        lines = [f"{self.what} on {self.device.name} (sm_{self.device.arch}): {self.engine} engine"]
        if self.device.code.arch != self.device.arch:
            lines.append(f"  code: compiled for sm_{self.device.code.arch}")
        lines += [f"  {name}: {value}" for name, value in self.tiles.items()]
        lines += [f"  not {limit}" for limit in self.refused]
        lines += [f"  {limit}" for limit in self.limits]
        if self.binding is not None:
            lines.append(f"  binding: {self.binding.name}")
        return "\n".join(lines)


def _registers(device: Device, kernel: str, size: str) -> str:
    row = dict(entry.split(":") for entry in REGISTERS.get(device.arch, {}).get(kernel, "").split())
    return f"{row[size]} a lane" if size in row else "not measured"


def explain_plan(
    cell: str,
    heads: int,
    width: int,
    batch: int,
    dtype: object,
    arch: object,
    steps: int = 1024,
    precision: str = "highest",
    code: Optional[str] = None,
) -> Plan:
    """What runs `cell` on x[batch, steps, G, heads, width]: engine, tiles, grid, memory, and why.

    ``dtype`` is torch's or its name; ``arch`` an arch or a GPU's name; ``code`` the arch that the
    library's kernels were compiled for, where it is not the GPU's own. Shows itself when printed.
    """
    given = {"heads": heads, "width": width, "batch": batch, "steps": steps}
    for name, value in given.items():
        check_whole(name, value, 1, "an int >= 1")
    check_choice("precision", precision, ("highest", "tf32"))
    name = str(dtype if isinstance(dtype, (str, torch.dtype)) else shown(dtype))
    name = name.replace("torch.", "")
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4}
    find_cell(cell)
    check_choice("dtype", name, tuple(sizes))
    sizes_of, element, device = CELLS[cell], sizes[name], find_device(arch)
    if code is not None:
        device = with_code(device, code)
    p = Problem(batch, steps, heads, width, sizes_of.gates, element, precision == "tf32")
    engine, refused = select_engine(p, device)
    tiles: Dict[str, str] = {}
    limits: List[Limit] = []
    if engine == "block":
        tile, padded = block_tile(p, device), block_width(width, element)
        tiles["grid"] = f"{heads * divide_up(batch, tile)} thread blocks, {tile} sequences each"
        tiles["width compiled"] = str(padded)
        for direction, per_unit in (("forward", 4), ("backward", 2)):
            tiles[f"threads {direction}"] = str(padded * per_unit)
            used = block_shared_bytes(sizes_of, width, element, direction)
            limits.append(Limit(f"{direction} shared memory", used, device.shared_bytes, "bytes"))
            kernel, size = f"block-{direction}-{cell}", f"{8 * element}-{padded}"
            tiles[f"registers {direction}"] = _registers(device, kernel, size)
    elif engine == "cluster":
        tile, members = cluster_tile(p, device), cluster_members(width)
        tiles["grid"] = (
            f"{heads * divide_up(batch, tile)} clusters of {members} thread blocks, "
            f"{tile} sequences each"
        )
        tiles["units of a block"] = str(CLUSTER_UNITS)
        limits += cluster_limits(p, device)[1:]
        for direction in ("forward", "backward"):
            used = cluster_shared_bytes(sizes_of, width, tile, direction)
            limits.append(Limit(f"{direction} shared memory", used, device.shared_bytes, "bytes"))
    elif engine == "grid":
        tall = sizes_of.gates == 4 and takes_tall_blocks(p, device)
        units = TALL_UNITS if tall else GRID["units"]
        members, count = divide_up(width, units), divide_up(batch, COLUMNS)
        launches = divide_up(heads, device.sms // members)
        at_once = divide_up(heads, launches)
        groups = min(max(device.sms // (at_once * members), 1), count)
        tiles["grid"] = (
            f"{at_once} heads x {groups} groups x {members} thread blocks, {launches} launches"
        )
        tiles["tiles of a group"] = f"{divide_up(count, groups)} of {COLUMNS} sequences"
        if (
            divide_up(count, groups) > 3
            if tall
            else (takes_wide_tiles(batch, heads, width, device, backward=False))
        ):
            tiles["tiles of a group"] += (
                ", two at a time where registers allow and no step is masked"
            )
        tiles["units, warps of the product"] = f"{units}, {GRID['warps']}"
        forward = forward_shape(sizes_of.gates, sizes_of.states, element)
        backward = backward_shape(
            sizes_of.gates, sizes_of.states, sizes_of.saved, sizes_of.bias_rows, element
        )
        for direction, shape in (("forward", forward), ("backward", backward)):
            chunks = blocks_of_depth(shape, width) * shape.panels
            held = min(chunks, held_chunks(shape))
            tiles[f"chunks {direction}"] = f"{held} in registers, {chunks - held} in shared memory"
            limits += grid_limits(shape, width, device, direction)[1:]
            kernel = f"grid-{direction}-{cell}"
            tiles[f"registers {direction}"] = _registers(device, kernel, str(8 * element))
        limits = list(dict.fromkeys(limits))
    what = f"{cell} {heads}x{width}, batch {batch}, {steps} steps, {name}"
    return Plan(engine, device, what, tiles, limits, refused)
