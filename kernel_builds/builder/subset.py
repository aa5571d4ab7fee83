"""Chooses which sources `scripts/build_kernels --check` compiles to machine code, and runs nvcc on
them.

A kernel's sources are compiled without optimisation: ptxas then finds errors in inline PTX and
kernels that use too much shared memory. A source named <engine>_<cell>.cu whose engine is in
SUBSET without this cell is only read by nvcc's front end: templates are instantiated and
static_asserts evaluated for sm_90a, and its symbols exist for the linker. SUBSET lists, for each
engine, the cells that use most of its branches (gru has an extra bias row and a separate
gradient; slstm has four states, one without a gradient), and every cell at least once.

Seconds of one Zen 3 core for the release, without optimisation, and by the front end alone:
fused-rnn's grid_gru.cu 158, 37 and 8; diagonal-rnn's flash_gru.cu 80, 18 and 7; tfla's
backward/run.cu 141, 20 and 6.
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
        "gemm": ("gru", "slstm"),
        "fma": ("gru", "slstm"),
        "batch": ("gru",),
        "wide": ("gru",),
        "step": ("gru", "rnn", "slstm"),
        "cell": ("gru", "rnn"),
        "cut": ("gru", "slstm"),
    }
}
CUDA = (13, 0)  # nvcc of this version supports these archs
COMPILED, READ = "--Ofast-compile=max", "-fdevice-syntax-only"


def only_read(kernel: str, sources: list[str]) -> list[str]:
    """Returns those of `sources` that do not become machine code."""
    engines = SUBSET.get(kernel, {})
    parts = {source: _parts(source) for source in sources if source.endswith(".cu")}
    return [s for s, (engine, cell) in parts.items() if cell not in engines.get(engine, (cell,))]


def problems(kernel: str, sources: list[str]) -> list[str]:
    """Returns what keeps the subset from showing that `sources`, as build.toml lists them, compile."""
    engines, stems = SUBSET.get(kernel, {}), {PurePath(s).stem for s in sources}
    named = {f"{engine}_{cell}" for engine, cells in engines.items() for cell in cells}
    found = [f"subset.py names {stem}.cu, but build.toml does not" for stem in named - stems]
    found += [f"subset.py compiles no cell of {e}" for e, cells in engines.items() if not cells]
    left = only_read(kernel, sources)
    compiled = {_parts(source)[1] for source in sources if source not in left}
    missing = {_parts(source)[1] for source in left} - compiled
    return sorted(found) + [f"subset.py compiles {c} with no engine" for c in sorted(missing)]


def launcher(kernel: str, sources: list[str]) -> list[str]:
    """Returns the command that CMake puts before nvcc. It contains the list, so that a change of
    the list rebuilds."""
    return [sys.executable, "-B", __file__, ",".join(only_read(kernel, sources))]


def _parts(source: str) -> tuple[str, str]:
    """Splits a file name: grid_gru.cu is the engine "grid" with the cell "gru"."""
    engine, _, cell = PurePath(source).stem.partition("_")
    return engine, cell


def main() -> None:
    """Runs `subset.py SOURCE,SOURCE nvcc ...`: nvcc, with the options for this source."""
    left, nvcc = sys.argv[1].split(","), sys.argv[2:]
    reads = any(word.endswith(f"/{source}") for source in left if source for word in nvcc)
    os.execv(nvcc[0], [*nvcc, READ if reads else COMPILED])


if __name__ == "__main__":
    main()
