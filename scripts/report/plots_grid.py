"""Draws the map of scripts/bench_grid: how many times as fast as torch.nn's calls of flashcell are."""

import csv
import math
from pathlib import Path
from typing import Any

from report.plots import plt

BATCHES = ((1, 4), (8, 32), (50, 128), (256, 512), (1000, 2048))
WIDTHS = ((16, 64), (96, 200), (256, 400), (500, 800), (1000, 1280), (1500, 2048))
PANELS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "exact": "fp32 without TF32"}
MODES = ("inference", "training")
MOST = 8.0  # the ratio of the darkest blue; the darkest red is 1 / MOST
Row = dict[str, str]


def newest(path: Path) -> list[Row]:
    """Returns the newest row of each call and seed."""
    keys = ("seed", "units", "net", "batch", "steps", "width", "precision", "mode")
    with path.open(newline="") as file:
        return list({tuple(r[k] for k in keys): r for r in csv.DictReader(file)}.values())


def cell(rows: list[Row], batches: tuple[int, int], widths: tuple[int, int]) -> tuple[float, float]:
    """Returns the geometric mean and the least of the ratios; nan if there is none."""
    found = [
        float(row["ratio"])
        for row in rows
        if batches[0] <= int(row["batch"]) <= batches[1]
        and widths[0] <= int(row["width"]) <= widths[1]
    ]
    if not found:
        return math.nan, math.nan
    return math.exp(sum(map(math.log, found)) / len(found)), min(found)


def draw_panel(ax: Any, rows: list[Row]) -> Any:
    table = [[cell(rows, b, w) for w in WIDTHS] for b in BATCHES]
    image = ax.imshow(
        [[math.log2(mean) for mean, _ in line] for line in table],
        cmap="RdBu", vmin=-math.log2(MOST), vmax=math.log2(MOST), aspect="auto", origin="lower",
    )  # fmt: skip
    for y, line in enumerate(table):
        for x, (mean, least) in enumerate(line):
            if math.isnan(mean):
                continue
            dark = abs(math.log2(mean)) > 0.6 * math.log2(MOST)
            color = "white" if dark else "black"
            ax.text(x, y + 0.13, f"{mean:.2g}", ha="center", va="center", color=color, fontsize=8)
            ax.text(
                x, y - 0.27, f"{least:.2g}", ha="center", va="center", color=color, fontsize=5.5
            )
    span = lambda pair: f"{pair[0]}–{pair[1]}"
    ax.set_xticks(range(len(WIDTHS)), map(span, WIDTHS), rotation=35, ha="right")
    ax.set_yticks(range(len(BATCHES)), map(span, BATCHES))
    ax.grid(False)
    return image


def draw_grid(path: Path) -> None:
    """Draws <name>.svg for the CSV file <name>.csv: a panel for each precision and mode."""
    rows = newest(path)
    panels = {k: v for k, v in PANELS.items() if any(r["precision"] == k for r in rows)}
    figure, axes = plt.subplots(
        len(MODES), len(panels), figsize=(2.9 * len(panels) + 0.9, 5.6), squeeze=False,
        sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    for line, mode in zip(axes, MODES, strict=True):
        for ax, (precision, title) in zip(line, panels.items(), strict=True):
            chosen = [r for r in rows if (r["precision"], r["mode"]) == (precision, mode)]
            image = draw_panel(ax, chosen)
            ax.set_title(f"{title}, {mode}: {len(chosen)} calls")
    for ax in axes[-1]:
        ax.set_xlabel("width")
    for ax in axes[:, 0]:
        ax.set_ylabel("batch")
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=40)
    ticks = range(-3, 4)
    bar.set_ticks(list(ticks), labels=[f"{2.0**t:g}" for t in ticks])
    bar.set_label("times as fast as torch.nn: geometric mean (small: the least)")
    bar.ax.grid(False)
    device = rows[0]["device"]
    figure.suptitle(f"flashcell's LSTM, GRU and RNN beside torch.nn's: {device}")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(f"drew {path.stem}.svg")
