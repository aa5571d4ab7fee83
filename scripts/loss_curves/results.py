"""Stores loss curves as CSV and draws them, for scripts/convergence."""

import csv
import datetime
import re
from collections import defaultdict
from pathlib import Path

import torch

from measurement.record import commit
from report.tables_training import is_noise

WINDOW = 10  # steps whose mean is one point
COLUMNS = [
    "comparison",
    "family",
    "precision",
    "provider",
    "B",
    "T",
    "step",
    "loss",
    "device",
    "torch",
]
COLUMNS += ["commit", "date"]
Key = tuple[str, str]  # precision, provider


def append(folder: Path, study: str, family: str, curves: dict, stamp: dict) -> Path:
    """Writes curves to <device>-convergence.csv, replacing those of the same study and family."""
    name = re.sub(r"[^a-z0-9]+", "-", stamp["device"].lower()).strip("-")
    path = folder / f"{name}-convergence.csv"
    rows = [r for r in read(path) if (r["comparison"], r["family"]) != (study, family)]
    stamp = stamp | {"torch": torch.__version__.split("+")[0]}
    stamp |= {"commit": stamp["commit"] or commit(), "date": datetime.date.today().isoformat()}
    for (provider, bf16), curve in curves.items():
        head = {"comparison": study, "family": family, "provider": provider}
        head["precision"] = "bf16" if bf16 else "fp32"
        for end in range(WINDOW, len(curve) + 1, WINDOW):
            loss = curve[end - WINDOW : end].mean().item()
            rows.append(head | {"step": end, "loss": f"{loss:.7g}"} | stamp)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot(folder: Path) -> None:
    """Draws each study of every CSV as <device>-convergence-<study>.svg next to it."""
    for path in sorted(folder.glob("*-convergence.csv")):
        studies: dict[str, dict[str, dict[Key, list[tuple[int, float]]]]] = defaultdict(dict)
        for row in read(path):
            curves = studies[row["comparison"]].setdefault(row["family"], {})
            point = int(row["step"]), float(row["loss"])
            curves.setdefault((row["precision"], row["provider"]), []).append(point)
        for study, families in studies.items():
            draw(path.with_name(f"{path.stem}-{study}.svg"), families)


def draw(path: Path, families: dict[str, dict[Key, list[tuple[int, float]]]]) -> None:
    """Draws the losses, and below them each curve's distance from the first of its precision."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "flashcell", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(families), figsize=(max(2.1 * len(families), 7), 4.6), squeeze=False, sharex=True
    )
    for column, (family, curves) in zip(axes.T, families.items(), strict=True):
        names = list(dict.fromkeys(provider for _, provider in curves if not is_noise(provider)))
        colors = {name: f"C{k}" for k, name in enumerate(names)}
        noise = {name: "0.8" for _, name in curves if is_noise(name)}
        firsts: dict[str, list[float]] = {}
        for (precision, provider), points in curves.items():
            steps, losses = map(list, zip(*points, strict=True))
            first = firsts.setdefault(precision, losses)
            style = {"color": (colors | noise)[provider], "linewidth": 1.0}
            style |= {"linestyle": ":" if precision == "bf16" else "-"}
            style |= {"zorder": 1} if provider in noise else {"label": f"{provider} {precision}"}
            column[0].plot(steps, losses, **style)
            if losses is not first:
                gaps = [abs(a - b) for a, b in zip(losses, first, strict=True)]
                column[1].semilogy(steps, gaps, **style)
        column[0].set_title(family)
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("loss, nats a byte")
    axes[1, 0].set_ylabel("distance from the first")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = min(len(families) + 1, 5)  # the picture is wide enough for five
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.03 * (len(labels) // columns), 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
