"""Reads and writes scripts/results/tasks.csv, and makes its table and picture."""

import csv
import datetime
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts/results/tasks.csv"
PICTURE = RESULTS.with_suffix(".svg")
COLUMNS = (
    "task", "model", "parameters", "seed", "learning_rate", "steps", "batch", "status", "step",
    "accuracy", "loss", "device", "torch", "commit", "date",
)  # fmt: skip
KEY = ("task", "model", "seed", "learning_rate", "steps", "batch")
NAMES = {
    "rnn": "Elman", "gru": "GRU", "lstm": "LSTM", "slstm": "sLSTM", "flash_gru": "FlashGRU",
    "flash_lstm": "FlashLSTM", "mlstm": "mLSTM", "mamba2": "Mamba2", "transformer": "Transformer",
}  # fmt: skip
# arXiv 2412.07752, table 2 (the mean of three seeds; its Mamba is the first one, and not in here),
# and arXiv 2510.21450, table 6 (the best of three seeds).
PUBLISHED = {
    "parity-extrapolation": {
        "transformer": 0.52, "mlstm": 0.54, "rnn": 1.0, "gru": 1.0, "lstm": 1.0, "slstm": 1.0,
    },
    "keep-5th": {"transformer": 1.0, "mamba2": 0.01, "flash_gru": 1.0, "flash_lstm": 1.0},
    "parity": {"transformer": 0.53, "mamba2": 0.52, "flash_gru": 1.0, "flash_lstm": 1.0},
    "mqar": {"transformer": 1.0, "mamba2": 1.0, "flash_gru": 1.0, "flash_lstm": 1.0},
    "mqar-zoology": {},
    "1-hop": {"transformer": 0.82, "mamba2": 1.0, "flash_gru": 1.0, "flash_lstm": 1.0},
    "2-hop": {"transformer": 0.78, "mamba2": 0.98, "flash_gru": 1.0, "flash_lstm": 1.0},
    "2-find": {},
}  # fmt: skip
MEAN_OF_SEEDS = ("parity-extrapolation",)
Row = dict[str, str]


def read(path: Path = RESULTS) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def key(row: dict) -> tuple[str, ...]:
    """Returns the key of an experiment, as text, equal for rows read and rows to be written."""
    words = {**row, "learning_rate": f"{float(row['learning_rate']):g}"}
    return tuple(str(words[name]) for name in KEY)


def append(rows: list[dict], path: Path = RESULTS) -> None:
    """Appends rows to the file in one write, after the header if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def provenance(device: str, commit: str | None = None) -> dict[str, str]:
    import torch

    from measurement.record import device_name, output_of

    git = ("git", "-C", str(ROOT))
    parts = ("kernel_builds", "modeling", "configuration", "scripts/tasks")
    scripts = map(str, (ROOT / "scripts").glob("_tasks*.py"))
    head = output_of(*git, "rev-parse", "--short=10", "HEAD")
    dirty = output_of(*git, "status", "--porcelain", "--", *parts, *scripts)
    return {
        "device": device_name(device),
        "torch": torch.__version__.split("+")[0],
        "commit": commit or (head + ("+dirty" if dirty else "") if head else "unknown"),
        "date": datetime.date.today().isoformat(),
    }


def best_rate(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of the learning rate with the best mean accuracy, then the fewest steps.

    A rate with a run that was stopped, because every seed of another had solved the task, is
    skipped."""
    rates: dict[str, list[Row]] = {}
    for row in rows:
        rates.setdefault(row["learning_rate"], []).append(row)
    done = [r for r in rates.values() if all(row["status"] != "stopped" for row in r)]
    return max(done, key=lambda r: (reached(r), -mean(int(x["step"]) for x in r)))


def reached(rows: list[Row]) -> float:
    return mean(float(r["accuracy"]) if r["status"] != "diverged" else 0.0 for r in rows)


def summary(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Returns (task, model) -> its runs at the best rate, of the protocol with the most
    examples."""
    groups: dict[tuple[str, str], dict[tuple[int, int], list[Row]]] = {}
    for row in rows:
        protocol = int(row["steps"]) * int(row["batch"]), int(row["steps"])
        protocols = groups.setdefault((row["task"], row["model"]), {})
        protocols.setdefault(protocol, []).append(row)
    order = [(task, model) for task in PUBLISHED for model in NAMES]
    return {name: best_rate(groups[name][max(groups[name])]) for name in order if name in groups}


def score(task: str, rows: list[Row]) -> float:
    """Returns the mean or the best accuracy of the seeds, as the task's paper reports it."""
    return reached(rows) if task in MEAN_OF_SEEDS else max(reached([row]) for row in rows)


def table(path: Path = RESULTS) -> str:
    text = (
        "| task | model | parameters | accuracy | published | seeds, of these solved | learning rate "
        "| solved after | of at most | batch | on |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for (task, model), rows in summary(read(path)).items():
        first = rows[0]
        solved = [int(row["step"]) for row in rows if row["status"] == "solved"]
        published = PUBLISHED[task].get(model)
        cells = [
            task, NAMES[model], f"{int(first['parameters']):,}", f"{score(task, rows):.4f}",
            "" if published is None else f"{published:.2f}", f"{len(rows)}, {len(solved)}",
            f"{float(first['learning_rate']):g}", f"{mean(solved):,.0f} steps" if solved else "",
            f"{int(first['steps']):,}", first["batch"], f"{first['device']}, {first['date']}",
        ]  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    return text


def draw(path: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Draws every model's accuracy, one panel per task, with chance level or published results."""
    from report.plots import plt, save

    found = summary(read(path))
    tasks = [task for task in PUBLISHED if any(task == name for name, _ in found)]
    figure, panels = plt.subplots(1, len(tasks), figsize=(1 + 2.2 * len(tasks), 2.8), squeeze=False)
    for task, ax in zip(tasks, panels[0], strict=True):
        models = [model for model in NAMES if (task, model) in found]
        ax.bar(range(len(models)), [score(task, found[task, m]) for m in models], color="C0")
        said = [(i, PUBLISHED[task][m]) for i, m in enumerate(models) if m in PUBLISHED[task]]
        if said:
            ax.plot(*zip(*said, strict=True), "k_", markersize=14, label="published")
            ax.legend(loc="lower left")
        ax.set_xticks(range(len(models)), [NAMES[m] for m in models], rotation=60, ha="right")
        ax.set(title=task, ylim=(0, 1.05), ylabel="accuracy")
    save(figure, picture)
