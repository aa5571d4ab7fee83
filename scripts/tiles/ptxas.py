"""Reads ptxas's registers and spills of the engines' kernels, for each arch.

It compiles block_*.cu and grid_*.cu as the build does, with -Xptxas -v, or reads the log of a build
that did, and keeps the worst instantiation of each kernel.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)")
PROPERTIES = re.compile(r"Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
BLOCK = re.compile(r"Block(Forward|Backward)I(.+?)(f|6__half|13__nv_bfloat16)Li(\d+)E")
GRID = re.compile(r"(Forward|Backward)PassI(.+?)(f|6__half|13__nv_bfloat16)(?:Li\d+)?E")
CELLS = {"Lstm": "lstm", "Gru": "gru", "Slstm": "slstm", "Tanh": "rnn_tanh", "Relu": "rnn_relu"}
SHARED = Path(__file__).resolve().parents[2] / "kernel_builds"
COLUMNS = ("arch", "kernel", "registers", "spill_bytes", "held")
# (arch, kernel) -> registers, bytes spilt, and `held` of the grid engine's tiles at that time
Measured = dict[tuple[int, str], tuple[int, int, int]]


class Kernel(NamedTuple):
    """The identity of kernels that have the same tiles, whatever their other template arguments."""

    engine: str
    direction: str
    cell: str
    bits: int
    width: int  # the width it is compiled for; 0 for any

    def __str__(self) -> str:
        name = f"{self.engine}-{self.direction}-{self.cell}-{self.bits}"
        return f"{name}-{self.width}" if self.width else name


def kernel_of(symbol: str) -> Kernel | None:
    """Returns the engine kernel of a mangled name, or None for other symbols."""
    found = BLOCK.search(symbol) or GRID.search(symbol)
    if found is None:
        return None
    cell = next((name for word, name in CELLS.items() if re.search(rf"\d{word}", found[2])), None)
    if cell is None:
        return None
    width = int(found[4]) if found.re is BLOCK else 0
    engine = "block" if found.re is BLOCK else "grid"
    return Kernel(engine, found[1].lower(), cell, 32 if found[3] == "f" else 16, width)


def parse(log: str, held: int) -> Measured:
    """Parses a compiler's log into the worst instantiation of each kernel, built with `held`."""
    worst: Measured = {}
    symbol, arch, described, spilt = "", 0, "", 0
    for line in log.splitlines():
        if found := ENTRY.search(line):
            symbol, arch, spilt = found[1], int(found[2]), 0
        elif found := PROPERTIES.search(line):
            described = found[1]
        elif (found := SPILLS.search(line)) and described == symbol:
            spilt = max(int(found[1]), int(found[2]))
        elif (found := REGISTERS.search(line)) and (kernel := kernel_of(symbol)):
            before = worst.get((arch, str(kernel)), (0, 0, held))
            registers = max(before[0], int(found[1]))
            worst[arch, str(kernel)] = (registers, max(before[1], spilt), held)
            symbol = ""
    return worst


def compile_engines(
    nvcc: Path, csrc: Path, header: str, held: int, gencode: list[str], work: Path
) -> Measured:
    """Compiles a copy of `csrc` whose tiles.h is `header`; raises if a source does not compile."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(csrc, work / "csrc")
    (work / "csrc/cuda/tiles.h").write_text(header)
    folder = work / "csrc/cuda/instantiations"
    sources = [s for e in ("block", "grid") for s in sorted(folder.glob(f"{e}_*.cu"))]

    def run(source: Path) -> str:
        command = [str(nvcc), "-std=c++20", "-O3", "-fatbin", *gencode, "-Xptxas", "-v"]
        command.append(f"-I{SHARED}")
        out = ["-o", str(source.with_suffix(".fatbin"))]
        done = subprocess.run([*command, str(source), *out], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {source.name} does not compile:\n{done.stderr[-3000:]}")
        return done.stdout + done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return parse("".join(pool.map(run, sources)), held)


def read(path: Path) -> Measured:
    """Reads registers.csv; empty if there is none."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            (int(row["arch"]), row["kernel"]): tuple(int(row[name]) for name in COLUMNS[2:])  # type: ignore[misc]
            for row in csv.DictReader(file)
        }


def write(path: Path, measured: Measured) -> None:
    """Writes registers.csv: one row per kernel and arch, sorted."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*key, *value) for key, value in sorted(measured.items()))
