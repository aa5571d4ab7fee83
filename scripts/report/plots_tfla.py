"""Draws tfla's figures from the rows of bench_ops --suite tfla."""

import re
from collections.abc import Callable
from pathlib import Path

from measurement.hardware import BANDWIDTH, RATE
from report.plots import plt, save
from report.tables_diagonal import Providers, Row

PASSES = {"forward": "forward", "train": "forward + backward"}
Lines = dict[str, dict[float, float]]


def chunk_of(row: Row) -> int:
    found = re.search(r"chunk(\d+)$", row["case"])
    return int(found.group(1)) if found else 0


def lines_of(
    cases: Providers, form: str, which: str, at: Callable[[Row], int], value: str = "p50_ms",
    label: Callable[[Row], str] = lambda row: row["provider"],
) -> Lines:  # fmt: skip
    """Returns label -> {axis value: value} for one suite's rows."""
    lines: Lines = {}
    for providers in cases.values():
        for passes in providers.values():
            row = passes.get(which)
            if row is not None and row["form"] == form and row[value]:
                lines.setdefault(label(row), {})[at(row)] = float(row[value])
                if row["provider"] == "ours" and value == "p50_ms":
                    lines.setdefault("floor", {})[at(row)] = float(row["floor_ms"])
    return lines


def draw_lines(ax, lines: Lines, scale: float = 1.0) -> None:
    for label, points in sorted(lines.items()):
        style = {"color": "0.6", "linestyle": ":"} if label == "floor" else {"marker": "o"}
        x, y = zip(*sorted(points.items()), strict=True)
        ax.plot(x, [scale * value for value in y], label=label, markersize=3, **style)
    ax.set(xscale="log", yscale="log")
    ticks = sorted({x for points in lines.values() for x in points})
    ax.set_xticks(ticks, labels=[f"{x:g}" for x in ticks], fontsize=6)
    ax.minorticks_off()


def model_of(cases: Providers, state: int = 2) -> Lines:
    """Returns the cost model's forward time for each shape and chunk size.

    It adds products and memory traffic, with states in 16 bits."""
    from flashcell.kernels.tfla import cost_model
    from flashcell.kernels.tfla.cells import CELLS

    rows = [p["forward"] for s in cases.values() for p in s.values() if "forward" in p]
    lines: Lines = {}
    for row in rows:
        if row["form"] != "chunks" or row["provider"] != "ours":
            continue
        _, gate, shape = row["case"].split("-")[:3]
        heads, key, value = map(int, shape.split("x"))
        L = chunk_of(row)
        seconds = cost_model.runtime(
            CELLS[gate], key, value, int(row["T"]), L, cost_model.DEVICES["H200"],
            heads * int(row["B"]), state=state,
        )  # fmt: skip
        lines.setdefault(f"cost model {shape}", {})[L] = 1e3 * seconds
    return lines


def draw_chunks(path: Path, cases: Providers) -> None:
    """Draws time and memory of both passes over the chunk size, and the cost model's forward."""
    label = lambda row: f"{row['provider']} {'-'.join(row['case'].split('-')[1:3])}"
    panels = [(which, value) for value in ("p50_ms", "peak_mib") for which in PASSES]
    found = [lines_of(cases, "chunks", which, chunk_of, value, label) for which, value in panels]
    if not any(found):
        return
    figure, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True)
    for (which, value), lines, ax in zip(panels, found, axes.flat, strict=True):
        time = value == "p50_ms"
        draw_lines(ax, {k: v for k, v in lines.items() if k != "floor"}, 1 if time else 2**20 / 1e9)
        if time and which == "forward":
            for color, (name, points) in zip(
                ("0.5", "0.75"), model_of(cases).items(), strict=False
            ):
                ax.plot(*zip(*sorted(points.items()), strict=True), "--", color=color, label=name)
        ax.set(title=PASSES[which], ylabel="ms" if time else "GB beside the inputs")
    for ax in axes[1]:
        ax.set(xlabel="chunk size requested")
    axes[0][0].set_ylim(top=5 * axes[0][0].get_ylim()[1])  # room for the legend
    axes[0][0].legend(fontsize=5, ncols=2, loc="upper left")
    save(figure, path.with_name(f"{path.stem}-tfla-chunks.svg"))


def draw_sweep(path: Path, cases: Providers, form: str, column: str, words: str) -> None:
    found = [lines_of(cases, form, which, lambda row: int(row[column])) for which in PASSES]
    if not any(found):
        return
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for which, lines, ax in zip(PASSES, found, axes, strict=True):
        draw_lines(ax, lines)
        ax.set(title=PASSES[which], xlabel=words, ylabel="ms")
    axes[0].legend(fontsize=6)
    save(figure, path.with_name(f"{path.stem}-tfla-{form}.svg"))


def draw_roofline(path: Path, cases: Providers) -> None:
    """Draws our kernel in the roofline of the device, for the cases with a target."""
    rows = [
        row
        for providers in cases.values()
        for row in providers.get("ours", {}).values()
        if row["form"] == "must" and row["tflops"]
    ]
    if not rows:
        return
    figure, ax = plt.subplots(figsize=(6, 4))
    knee = RATE / BANDWIDTH
    ends = [0.5, knee, 2000]
    ax.plot(ends, [min(x * BANDWIDTH, RATE) / 1e12 for x in ends], "k-", linewidth=1)
    for row in rows:
        tflops = float(row["tflops"])
        marker = {"forward": "o", "train": "s", "step": "^"}[row["pass"]]
        label = f"{row['case'].removeprefix('mlstm-')} {row['pass']}"
        ax.plot(1e3 * tflops / float(row["gbps"]), tflops, marker, label=label, markersize=5)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte, each tensor once", ylabel="TFLOP/s")
    ax.legend(fontsize=5)
    save(figure, path.with_name(f"{path.stem}-tfla-roofline.svg"))


def draw_tfla(path: Path, cases: Providers) -> None:
    draw_chunks(path, cases)
    draw_sweep(path, cases, "heads", "D", "width of a head, 4096 in all, B 4, T 8192")
    draw_sweep(path, cases, "lengths", "T", "length, 65,536 tokens")
    draw_roofline(path, cases)
