"""The instantiations that `scripts/build_kernels --check` compiles, and its launcher of nvcc.

A kernel's sources are compiled to machine code, without optimisation: ptxas finds errors in inline
PTX and kernels with too much shared memory. Where a source is <engine>_<cell>.cu and its engine
stands in SUBSET without this cell, only nvcc's front end reads it: templates are instantiated and
static_asserts judged for sm_90a as ever, and what it defines is there for the linker. Compiled are of
each engine the cells that take most of its branches (gru: a bias row and a gradient of its own;
slstm: four states, of which one has no gradient), and every cell somewhere.

Seconds of one Zen 3 core as released, so, and by the front end alone: fused-rnn's grid_gru.cu 158,
37 and 8; diagonal-rnn's flash_gru.cu 80, 18 and 7; tfla's backward/run.cu 141, 20 and 6.
"""

from __future__ import annotations

import os
import sys
from pathlib import PurePath

SUBSET = {
    "fused-rnn": {
        "block": ("gru", "slstm"),
        "cluster": ("gru", "lstm", "slstm"),
        "grid": ("gru", "slstm"),
        "step": ("gru", "rnn", "slstm"),
    }
}
CUDA = (13, 0)  # whose nvcc knows these
COMPILED, READ = "--Ofast-compile=max", "-fdevice-syntax-only"


def only_read(kernel: str, sources: list[str]) -> list[str]:
    """Those of `sources` that do not become machine code."""
    engines = SUBSET.get(kernel, {})
    parts = {source: _parts(source) for source in sources if source.endswith(".cu")}
    return [s for s, (engine, cell) in parts.items() if cell not in engines.get(engine, (cell,))]


def problems(kernel: str, sources: list[str]) -> list[str]:
    """What keeps the subset from showing that `sources` compile; build.toml lists these."""
    engines, stems = SUBSET.get(kernel, {}), {PurePath(s).stem for s in sources}
    named = {f"{engine}_{cell}" for engine, cells in engines.items() for cell in cells}
    found = [f"subset.py names {stem}.cu, but build.toml does not" for stem in named - stems]
    found += [f"subset.py compiles no cell of {e}" for e, cells in engines.items() if not cells]
    left = only_read(kernel, sources)
    compiled = {_parts(source)[1] for source in sources if source not in left}
    missing = {_parts(source)[1] for source in left} - compiled
    return sorted(found) + [f"subset.py compiles {c} with no engine" for c in sorted(missing)]


def launcher(kernel: str, sources: list[str]) -> list[str]:
    """The command CMake puts before nvcc; the list stands in it so that another list builds anew."""
    return [sys.executable, "-B", __file__, ",".join(only_read(kernel, sources))]


def _parts(source: str) -> tuple[str, str]:
    """grid_gru.cu is the engine "grid" with the cell "gru"."""
    engine, _, cell = PurePath(source).stem.partition("_")
    return engine, cell


def main() -> None:
    """subset.py SOURCE,SOURCE nvcc ...: that nvcc, told what to do with its source."""
    left, nvcc = sys.argv[1].split(","), sys.argv[2:]
    reads = any(word.endswith(f"/{source}") for source in left if source for word in nvcc)
    os.execv(nvcc[0], [*nvcc, READ if reads else COMPILED])


if __name__ == "__main__":
    main()
