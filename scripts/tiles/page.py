"""Writes the notebook's section on tiles: plans for one GPU with measured times, spills, widths."""

from __future__ import annotations

from pathlib import Path

from flashcell.kernels.fused_rnn.devices import DEVICES, Device
from flashcell.kernels.fused_rnn.explain import Limit
from tiles import published as flashrnn
from tiles.files import measured_steps, spaced, table
from tiles.planner import Planner
from tiles.ptxas import Measured

SHOWN = 90  # the arch whose plans and times it shows; plans.csv has them all
INTRODUCTION = """## Tiles of the CUDA engines

Written by `scripts/plan_tiles --write`: do not edit. The constraints stand at the head of
`scripts/tiles/model.py`; `pins.toml` holds what is fixed by hand, `registers.csv` what ptxas measured,
`tiles.toml` the solution that `csrc/cuda/tiles.h` hands to the build, `plans.csv` every arch.
"""
PUBLISHED = """
### Attainable head widths

One LSTM head, forward and backward, bf16, multiples of 32 from 1280 on. FlashRNN's are published
(arXiv 2412.07752, H.1); its constraints as the paper states them, solved by `scripts/plan_tiles
--published` (batch {batch}, fp32 sums), give the same lists: {verdict}. What that takes to see: the
shared memory a block may ask for (99, 163 and 227 KB), not the 128, 192 and 228 KB the paper quotes.

{table}
FlashRNN cuts both dimensions of the weight over the grid, so a width needs divisors that fill the
SMs: above {dense} its list has gaps. Here a thread block keeps 16 units whole, any multiple of
8 (fp32: 4) does, and the edge is ceil(D / 16) <= SMs or, with 99 KB, the shared memory: nothing
is split along the depth of the product across blocks, which would cost a second exchange in each step.
Wider heads, up to any width, run in the step engine, where FlashRNN needs another backend.
"""


def own_widths(planner: Planner, device: Device, cell: str, dtype: str) -> tuple[int, Limit]:
    """Returns the grid engine's widest head, and the limit that the next one exceeds."""
    step, widest, reason = 16 // {"bfloat16": 2, "float32": 4}[dtype], 0, None
    for width in range(step, 4096, step):
        build = planner.explain(cell, 1, width, 16, dtype, device.name, precision="tf32")
        if build.engine in ("step", "gemm"):
            reason = build.refused[-1]
            break
        widest = width
    assert reason is not None
    return widest, reason


def published(planner: Planner) -> str:
    """Returns the part of the section about attainable widths."""
    rows, differing = [], []
    for gpu in flashrnn.GPUS:
        solved = flashrnn.widths(gpu.sms, gpu.shared_bytes)
        if tuple(solved) != gpu.published:
            differing.append(f"{gpu.name} by {sorted({*solved} ^ {*gpu.published})}")
        device = next(d for d in DEVICES if d.name == gpu.name)
        lstm, reason = own_widths(planner, device, "lstm", "bfloat16")
        others = [own_widths(planner, device, cell, "bfloat16")[0] for cell in ("gru", "rnn_tanh")]
        tf32 = own_widths(planner, device, "lstm", "float32")[0]
        most = f"{max(gpu.published)}: {spaced(list(gpu.published), 32)}"
        rows.append([gpu.name, most, len(gpu.published), len(solved), f"all to {lstm}", reason.name,
                     f"{others[0]}, {others[1]}, {tf32}"])  # fmt: skip
    header = ["GPU", "FlashRNN, published", "count", "solved here", "lstm here", "then over",
              "gru, rnn, lstm tf32"]  # fmt: skip
    dense = next(w for w in range(1280, 4096, 32) if w + 32 not in flashrnn.GPUS[-1].published)
    return PUBLISHED.format(
        batch=flashrnn.BATCH,
        verdict="they differ for " + "; ".join(differing) if differing else "to the last width",
        table=table(header, rows),
        dense=dense,
    )


def text(
    rows: list[dict[str, object]],
    constants: dict[str, dict[str, int]],
    measured: Measured,
    results: Path,
    planner: Planner,
) -> str:
    """Returns the whole section."""
    times = measured_steps(results)
    lines = []
    for row in rows:
        if row["arch"] == SHOWN:
            key = (str(row["cell"]), str(row["dtype"]), int(str(row["width"])))
            shape = [row[k] for k in ("cell", "dtype", "width", "engine", "binding", "alone")]
            lines.append([*shape, times.get(key, "")])
    values = "\n".join(
        f"* {engine}: " + ", ".join(f"{name} {value}" for name, value in names.items())
        for engine, names in constants.items()
    )
    spills = [(arch, kernel, *r[:2]) for (arch, kernel), r in sorted(measured.items()) if r[1]]
    header = ["cell", "dtype", "width", "engine", "least room", "alone, the solver takes",
              "measured forward / backward, us a step"]  # fmt: skip
    return (
        f"{INTRODUCTION}\nOne binary serves every shape with\n\n{values}\n"
        f"\n### Plans on sm_{SHOWN} (one head, batch 16; fp32 as tf32)\n\n{table(header, lines)}"
        f"\n### Kernels that spill: {len(spills)} of {len(measured)}\n\n"
        f"{table(['arch', 'kernel', 'registers', 'bytes'], spills)}{published(planner)}"
    )
