"""Writes the files of scripts/plan_tiles: data, the build's header, its Python copy, a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from tiles.ptxas import Measured

Constants = dict[str, dict[str, int]]  # engine -> name -> value
GRID_NAMES = {
    "units": "units of a thread block: the height of the matrix instruction",
    "warps": "product warps of a thread block; they split the depth",
    "tiles": "most tiles of eight sequences that a group alternates between",
    "stages": "stages of the input ring",
    "held": "registers of a lane that hold weights",
    "chunks": "largest product of depth chunks and row tiles that is unrolled",
    "blocks": "most blocks of the depth: their words are in flight to a lane",
}
BLOCK_NAMES = {
    "row_bytes": "bytes of a row of the widest head",
    "stages": "stages of the input ring, if they fit in ring_bytes",
    "few_stages": "stages if those do not fit, but these do",
    "least_stages": "stages if neither fit",
    "ring_bytes": "leaves room for operand and outputs on every GPU",
}
NAMES = {"grid": GRID_NAMES, "block": BLOCK_NAMES}


def camel(engine: str, name: str) -> str:
    """Returns a C++ constant's name: grid, ring_bytes -> kGridRingBytes."""
    return "k" + "".join(word.capitalize() for word in (engine, *name.split("_")))


def toml_text(constants: Constants) -> str:
    lines = ["# Solved by scripts/plan_tiles from pins.toml and registers.csv: do not edit."]
    for engine, names in NAMES.items():
        lines += ["", f"[{engine}]"]
        lines += [f"{name} = {constants[engine][name]}  # {why}" for name, why in names.items()]
    return "\n".join(lines) + "\n"


def header_text(constants: Constants) -> str:
    lines = [
        "// Tiles of the engines. Written by scripts/plan_tiles from tiles/tiles.toml: do not edit.",
        "#pragma once",
        "",
        "namespace flashcell::cuda::tiles {",
        "",
    ]
    for engine, names in NAMES.items():
        values = {n: f"constexpr int {camel(engine, n)} = {constants[engine][n]};" for n in names}
        width = max(map(len, values.values()))
        lines += [f"{values[name]:{width}}  // {why}" for name, why in names.items()]
        lines.append("")
    lines.append("}  // namespace flashcell::cuda::tiles")
    return "\n".join(lines) + "\n"


def python_text(constants: Constants, measured: Measured) -> str:
    lines = [
        '"""Tiles of the CUDA engines. Written by scripts/plan_tiles; reasons: tiles/pins.toml."""',
        "",
        "from typing import Dict",
        "",
    ]
    for engine, names in NAMES.items():
        entries = ", ".join(f'"{name}": {constants[engine][name]}' for name in names)
        lines.append(f"{engine.upper()} = {{{entries}}}")
    lines += [
        "",
        "# Registers of a lane as ptxas reports them, the most of a kernel's instantiations: arch ->",
        "# engine, direction and cell -> dtype bits, the width it is compiled for (if one), registers.",
        "REGISTERS: Dict[int, Dict[str, str]] = {",
    ]
    for arch in sorted({arch for arch, _ in measured}):
        rows: dict[str, list[str]] = {}
        for (of_arch, kernel), (registers, *_) in sorted(measured.items()):
            if of_arch == arch:
                engine, direction, cell, *size = kernel.split("-")
                entry = f"{'-'.join(size)}:{registers}"
                rows.setdefault(f"{engine}-{direction}-{cell}", []).append(entry)
        lines.append(f"    {arch}: {{")
        lines += [f'        "{name}": "{" ".join(r)}",' for name, r in sorted(rows.items())]
        lines.append("    },")
    return "\n".join([*lines, "}"]) + "\n"


def csv_text(rows: list[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def measured_steps(results: Path) -> dict[tuple[str, str, int], str]:
    """Returns (cell, dtype, width) -> 'forward / backward us a step (heads, batch)', batch 16
    before others."""
    if not results.is_file():
        return {}
    times: dict[tuple[str, str, int], dict[tuple[int, int], dict[str, str]]] = {}
    with results.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["provider"] != "ours" or row["form"] != "op" or row["pass"] == "step":
                continue
            shapes = times.setdefault((row["op"], row["dtype"], int(row["D"])), {})
            shapes.setdefault((int(row["B"]), int(row["N"])), {})[row["pass"]] = row["us_step"]
    found = {}
    for key, shapes in times.items():
        (batch, heads), passes = min(shapes.items(), key=lambda s: (s[0][0] != 16, s[0]))
        both = " / ".join(passes.get(which) or "-" for which in ("forward", "train"))
        found[key] = f"{both} ({heads} heads, batch {batch})"
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def spaced(widths: list[int], step: int) -> str:
    """Formats numbers as ranges: 1280, 1312, 1344, 1440 by 32 -> '1280–1344, 1440'."""
    runs: list[list[int]] = []
    for width in widths:
        if runs and width - runs[-1][-1] == step:
            runs[-1].append(width)
        else:
            runs.append([width])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
