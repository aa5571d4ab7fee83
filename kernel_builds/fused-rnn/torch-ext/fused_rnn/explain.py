"""Explains how a call runs on CUDA, with the answers of the binary's planner (csrc/cuda/explain.h)."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from . import dispatch
from .checks import check_choice, check_whole, find_cell
from .devices import Device, find_device, with_code
from .dispatch import shown
from .tiles import REGISTERS

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DIRECTIONS = ("forward", "backward")


class Limit(NamedTuple):
    """A limit of an engine, which can run only if used <= limit."""

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


class Plan(NamedTuple):
    """A call's engine, its tiles and the resources they take; it prints as a few lines."""

    engine: str
    device: Device
    what: str
    tiles: Dict[str, str]
    limits: List[Limit]  # limits of the chosen engine
    refused: List[Limit]  # limits that kept faster engines from this call
    engines: Tuple[str, ...]  # engines that FLASHCELL_CUDA_ENGINE may choose for this call
    fields: Dict[str, str]  # the planner's other answers, unchanged

    @property
    def binding(self) -> Optional[Limit]:
        """Returns the limit with the least room."""
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
    input_width: int = 0,
) -> Plan:
    """Explains how `cell` runs on x[batch, steps, G, heads, width]: engine, tiles, grid, memory,
    and why.

    With ``input_width`` the call is a layer of torch.nn in one direction, with one head, and
    includes the product of its input of so many units. ``fields["input"]`` says whether the engine
    computes this product; for packed sequences and layers in both directions it never does.
    ``dtype`` is torch's or its name; ``arch`` an arch or a GPU's name; ``code`` the arch that the
    library's kernels were compiled for, where it is not the GPU's own. Shows itself when printed.
    The planner is a part of the kernel's binary, of the CPU's too; no GPU is needed.
    """
    call = (cell, heads, width, batch, dtype, arch, steps, precision, code, input_width)
    return explain_with(_planner, *call)


def explain_with(
    planner: Callable[..., str],
    cell: str,
    heads: int,
    width: int,
    batch: int,
    dtype: object,
    arch: object,
    steps: int = 1024,
    precision: str = "highest",
    code: Optional[str] = None,
    input_width: int = 0,
) -> Plan:
    """Does what explain_plan does, with a planner that takes the op's arguments."""
    check_whole("input_width", input_width, 0, "an int >= 0")
    if input_width > 0 and heads != 1:
        raise ValueError(f"heads is {heads}, but must be 1 where input_width is given")
    sizes = {"heads": heads, "width": width, "batch": batch, "steps": steps}
    name, device = _check(cell, sizes, dtype, arch, precision)
    if code is not None:
        device = with_code(device, code)
    element = ELEMENT_BYTES[name]
    problem = (cell, batch, steps, heads, width, element, precision == "tf32")
    what = f"{cell} {heads}x{width}, batch {batch}, {steps} steps, {name}"
    text = planner(*problem, *_gpu(device), input_width)
    return _read(text, what, cell, 8 * element, device)


def explain_layers(
    cell: str,
    layers: int,
    width: int,
    batch: int,
    dtype: object,
    arch: object,
    steps: int = 1024,
    precision: str = "highest",
    training: bool = False,
) -> int:
    """Returns in chunks of how many steps the layers of a torch.nn module in one direction run side by
    side, or 0 if they run one after the other.

    Arguments otherwise as explain_plan's; ``training``: whether a backward pass follows."""
    if not isinstance(training, bool):
        raise TypeError(f"training is {shown(training)}, but must be True or False")
    sizes = {"layers": layers, "width": width, "batch": batch, "steps": steps}
    name, device = _check(cell, sizes, dtype, arch, precision)
    problem = (batch, steps, width, ELEMENT_BYTES[name], precision == "tf32")
    return _binary().plan_layers(cell, layers, training, *problem, *_gpu(device))


def _check(
    cell: str, sizes: Dict[str, int], dtype: object, arch: object, precision: str
) -> Tuple[str, Device]:
    """Returns the dtype's name and the GPU."""
    for name, value in sizes.items():
        check_whole(name, value, 1, "an int >= 1")
    check_choice("precision", precision, ("highest", "tf32"))
    name = str(dtype if isinstance(dtype, (str, torch.dtype)) else shown(dtype))
    name = name.replace("torch.", "")
    find_cell(cell)
    check_choice("dtype", name, tuple(ELEMENT_BYTES))
    return name, find_device(arch)


def _gpu(device: Device) -> Tuple[int, ...]:
    return (device.arch, *device.code, device.sms, device.shared_bytes)


def _binary() -> Any:
    if dispatch.ops is None:
        raise RuntimeError(
            "the planner is a part of the kernel's binary, but this copy of fused_rnn holds none: load a "
            "CPU or a CUDA variant of the kernel"
        )
    return dispatch.ops


def _planner(*arguments: object) -> str:
    return _binary().explain_plan(*arguments)


def _read(text: str, what: str, cell: str, bits: int, device: Device) -> Plan:
    """Parses the planner's lines to a Plan."""
    fields: Dict[str, str] = {}
    found: Dict[str, List[Limit]] = {"limit": [], "refused": []}
    for line in text.splitlines():
        key, *values = line.split("\t")
        if key in found:
            limit = Limit(values[0], int(values[1]), int(values[2]), values[3])
            if limit not in found[key]:  # limits of both passes appear twice
                found[key].append(limit)
        else:
            fields[key] = values[0]
    engine, engines = fields.pop("engine"), tuple(fields.pop("runs").split(","))
    tiles = TILES.get(engine)
    shown_tiles = tiles(fields) if tiles is not None else {}
    if "input" in fields:
        within = fields["input"] == "engine"
        shown_tiles["input"] = "multiplied by the engine" if within else "multiplied before"
    if "backward" in fields:
        shown_tiles["backward pass"] = f"{fields['backward']} engine"
    if engine in ("block", "grid"):
        size = f"{bits}-{fields['width']}" if engine == "block" else f"{bits}"
        for direction in DIRECTIONS:
            kernel = f"{engine}-{direction}-{cell}"
            shown_tiles[f"registers {direction}"] = _registers(device, kernel, size)
    return Plan(
        engine, device, what, shown_tiles, found["limit"], found["refused"], engines, fields
    )


def _registers(device: Device, kernel: str, size: str) -> str:
    row = dict(entry.split(":") for entry in REGISTERS.get(device.arch, {}).get(kernel, "").split())
    return f"{row[size]} a lane" if size in row else "not measured"


def _of_block(fields: Dict[str, str]) -> Dict[str, str]:
    tiles = {
        "grid": f"{fields['thread_blocks']} thread blocks, {fields['tile']} sequences each",
        "width compiled": fields["width"],
    }
    return {**tiles, **{f"threads {d}": fields[f"{d}.threads"] for d in DIRECTIONS}}


def _of_cluster(fields: Dict[str, str]) -> Dict[str, str]:
    grid = f"{fields['clusters']} clusters of {fields['members']} thread blocks"
    return {
        "grid": f"{grid}, {fields['tile']} sequences each",
        "units of a block": fields["units"],
    }


def _of_fma(fields: Dict[str, str]) -> Dict[str, str]:
    tiles = {**_of_cluster(fields), "width compiled": fields["width"]}
    if fields["members"] == "1":
        tiles["grid"] = f"{fields['clusters']} thread blocks, {fields['tile']} sequences each"
    return {**tiles, **{f"threads {d}": fields[f"{d}.threads"] for d in DIRECTIONS}}


def _of_batch(fields: Dict[str, str]) -> Dict[str, str]:
    tiles = f"{fields['tiles']} of {fields['tile']} sequences x {fields['units']} units"
    if fields["takes_turns"] == "yes":
        tiles += ", which two warpgroups take in turns"
    grid = f"{fields['thread_blocks']} thread blocks"
    if fields["launches"] != "1":
        grid += (
            f" in each of {fields['launches']} launches, one after another for parts of the heads"
        )
    return {"grid": grid, "tiles": tiles}


def _of_wide(fields: Dict[str, str]) -> Dict[str, str]:
    grid = (
        f"{fields['heads']} heads x {fields['groups']} groups x {fields['members']} thread blocks"
    )
    return {
        "grid": f"{grid}, {fields['launches']} launches",
        "sequences of a group": f"{fields['tile']}, {fields['pass']} at a time",
        "units of a block": fields["units"],
        **{f"elements staged {d}": fields[f"{d}.staged"] for d in DIRECTIONS},
        **{f"elements of a row in shared memory {d}": fields[f"{d}.held"] for d in DIRECTIONS},
    }


def _of_grid(fields: Dict[str, str]) -> Dict[str, str]:
    tiles: Dict[str, str] = {}
    for direction in DIRECTIONS:
        of = {k.split(".")[1]: v for k, v in fields.items() if k.startswith(f"{direction}.")}
        tiles[f"grid {direction}"] = (
            f"{of['heads']} heads x {of['groups']} groups x {of['members']} thread blocks, "
            f"{of['launches']} launches"
        )
        if of["split"] != "1":
            tiles[f"clusters {direction}"] = (
                f"of {of['split']} thread blocks, where the driver runs as many at once as expected"
            )
        masked = "" if of["tile"] == "8" else ", of 8 where a step is masked"
        tiles[f"tiles of a group {direction}"] = f"{of['tiles']} of {of['tile']} sequences{masked}"
        tiles[f"units, warps of the product {direction}"] = f"{of['units']}, {of['warps']}"
        tiles[f"chunks {direction}"] = (
            f"{of['chunks_held']} in registers, {of['chunks_shared']} in shared memory"
        )
    return tiles


TILES = {
    "block": _of_block,
    "cluster": _of_cluster,
    "grid": _of_grid,
    "fma": _of_fma,
    "batch": _of_batch,
    "wide": _of_wide,
}
