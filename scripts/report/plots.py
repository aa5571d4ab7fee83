"""Draws figures from a GPU's CSV files, one SVG each, for plot_bench --plots."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

from measurement.hardware import BANDWIDTH, RATE

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "flashcell", "font.size": 8, "axes.grid": True})
from matplotlib import pyplot as plt  # noqa: E402

AXES = {"D": "head width at d = 768", "B": "batch", "T": "length"}
COLORS = {"ours": "C0", "flashrnn": "C1", "cudnn-fp16": "C2", "cudnn-bf16": "C3", "sdpa": "C4",
          "loop": "C5", "compile": "C6"}  # fmt: skip
Row = dict[str, str]


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(f"drew {path.name}")


def sweep(cases: dict, op: str, form: str, axis: str, fixed: dict[str, int]) -> dict[str, dict]:
    """Returns provider -> pass -> {axis value: ms} for the cases that differ only in `axis`."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for providers in cases.values():
        row = next(iter(providers["ours"].values()))
        sizes = {key: int(row[key]) for key in "BTND"}
        alike = all(sizes[key] == value for key, value in fixed.items())
        plain = row["dtype"] == "bfloat16" and "recompute" not in row["case"]
        if (row["op"], row["form"]) != (op, form) or not alike or not plain:
            continue
        if sizes["N"] * sizes["D"] != 768:
            continue
        for provider, passes in providers.items():
            for which in ("forward", "train"):
                if which in passes:
                    line = lines.setdefault(provider, {}).setdefault(which, {})
                    line[sizes[axis]] = float(passes[which]["p50_ms"])
                    if provider == "ours":
                        floor = lines.setdefault("floor", {}).setdefault(which, {})
                        floor[sizes[axis]] = float(passes[which]["floor_ms"])
    return lines


def draw_sweep(path: Path, title: str, axis: str, lines: dict[str, dict]) -> None:
    if len(lines.get("ours", {}).get("forward", {})) < 2:
        return
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3))
    for which, name, ax in zip(
        ("forward", "train"), ("forward", "forward + backward"), axes, strict=True
    ):
        for provider, passes in lines.items():
            points = sorted(passes.get(which, {}).items())
            if points:
                style = {"color": "0.6", "linestyle": ":"} if provider == "floor" else {
                    "color": COLORS.get(provider, "k"), "marker": "o", "markersize": 3}  # fmt: skip
                ax.plot(*zip(*points, strict=True), label=provider, **style)
        ax.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="ms", title=f"{title}, {name}")
        ax.set_xticks(sorted(lines["ours"]["forward"]), labels=sorted(lines["ours"]["forward"]))
        ax.minorticks_off()
    axes[0].legend()
    save(figure, path)


def draw_sweeps(path: Path, cases: dict) -> None:
    for op in ("lstm", "slstm"):
        lines = sweep(cases, op, "op", "D", {"B": 16, "T": 1024})
        draw_sweep(path.with_name(f"{path.stem}-{op}-heads.svg"), f"{op}, B16 T1024", "D", lines)
        for size, form in ((s, f) for s in ("12x64", "1x768") for f in ("op", "linear")):
            N, D = map(int, size.split("x"))
            for axis, fixed in (("B", {"T": 1024}), ("T", {"B": 16})):
                lines = sweep(cases, op, form, axis, {"N": N, "D": D, **fixed})
                words = [op, size, *(["linear"] if form == "linear" else [])]
                name = f"{path.stem}-{'-'.join(words)}-{AXES[axis]}.svg"
                draw_sweep(path.with_name(name), " ".join(words), axis, lines)


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    newest = rows[-1]["date"], rows[-1]["commit"]
    return [row for row in rows if (row["date"], row["commit"]) == newest]


def draw_errors(path: Path) -> None:
    rows = rows_of(path)
    for kind, columns in (("step", ("p50", "p90", "p100")), ("drift", ("relative",))):
        figure, axes = plt.subplots(
            1, len(columns), figsize=(2.6 * len(columns) + 1, 3), squeeze=False
        )
        for column, ax in zip(columns, axes[0], strict=True):
            for name in dict.fromkeys(
                (r["provider"], r["dtype"]) for r in rows if r["kind"] == kind
            ):
                points = [
                    (int(row["step"]), float(row[column]))
                    for row in rows
                    if row["kind"] == kind and (row["provider"], row["dtype"]) == name
                ]
                ax.plot(*zip(*points, strict=True), label=" ".join(name), linewidth=0.8)
            ax.set(yscale="log", xscale="log" if kind == "drift" else "linear", xlabel="step")
            ax.set_title(f"|h - h64|, {column}" if kind == "step" else "relative error of 64 steps")
        axes[0][0].legend(fontsize=5)
        save(figure, path.with_name(f"{path.stem}-{kind}.svg"))


def draw_roofline(path: Path) -> None:
    figure, ax = plt.subplots(figsize=(5, 3.5))
    rows = rows_of(path)
    at = [float(row["flop_per_dram_byte"]) for row in rows]
    ends = [min([10.0, *at]) / 2, max([2000.0, *at])]
    knee = RATE / BANDWIDTH
    ax.plot([ends[0], knee, ends[1]], [ends[0] * BANDWIDTH / 1e12, RATE / 1e12, RATE / 1e12], "k-")
    for x, row in zip(at, rows, strict=True):
        marker = "o" if row["pass"] == "forward" else "s"
        label = f"{row['provider']} {row['case'].replace('-linear', '')} {row['pass']}"
        ax.plot(x, float(row["tflops"]), marker, color=COLORS.get(row["provider"]), label=label)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte of DRAM", ylabel="TFLOP/s")
    ax.legend(fontsize=5)
    save(figure, path.with_suffix(".svg"))


def draw_decode(path: Path) -> None:
    """Draws tokens/s of one sequence over its length, for the models of 1.4 and 7 billion."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "prefill"]
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3))
    large = [r for r in rows if r["model"].startswith(("flash_mlstm_7b", "xlstm"))]
    for ax, own in zip(axes, ([r for r in rows if r not in large], large), strict=True):
        for model in dict.fromkeys(row["model"] for row in own):
            points = {
                int(r["position"]): 1e3 / float(r["ms_token"]) for r in own if r["model"] == model
            }
            ax.plot(
                *zip(*sorted(points.items()), strict=True), marker="o", markersize=3, label=model
            )
        ax.set(xscale="log", yscale="log", xlabel="tokens before", ylabel="tokens/s")
        if own:
            ax.legend(fontsize=6)
    save(figure, path.with_suffix(".svg"))


def draw_all(
    results: Path,
    read_providers: Callable[[Path], dict],
    results_with: Callable[[str], Iterable[Path]],
) -> None:
    """Draws every figure that has rows, next to the CSV files in `results`."""
    for path in results_with("limit_ms"):
        draw_sweeps(path, read_providers(path))
    for path in results_with("kind"):
        draw_errors(path)
    for path in results_with("flop_per_dram_byte"):
        draw_roofline(path)
    for path in results_with("ms_token"):
        draw_decode(path)
