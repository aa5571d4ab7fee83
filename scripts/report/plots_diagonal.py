"""Draws diagonal-rnn's figures from the rows of bench_ops --suite pararnn."""

from pathlib import Path

from report.plots import plt, save
from report.tables_diagonal import Providers, studies

METHODS = {
    "ours": "auto",
    "sequential": "sequential",
    "multiple_shooting": "multiple_shooting",
    "newton": "newton",
}
METHODS |= {"pararnn-torch": "pararnn-torch"}


def draw_crossover(path: Path, cases: Providers) -> None:
    """Draws time over channels for each method and length: where the sequential method is
    faster."""
    lines: dict[int, dict[str, dict[int, float]]] = {}
    for providers in cases.values():
        row = providers.get("ours", {}).get("forward")
        if row is None or row["op"] != "flash_gru" or "multiple_shooting" not in providers:
            continue
        panel = lines.setdefault(int(row["T"]), {})
        panel.setdefault("floor", {})[int(row["D"])] = float(row["floor_ms"])
        for provider, passes in providers.items():
            panel.setdefault(provider, {})[int(row["D"])] = float(passes["forward"]["p50_ms"])
    lines = {T: panel for T, panel in lines.items() if len(panel["ours"]) > 1}
    if not lines:
        return
    figure, axes = plt.subplots(
        1, len(lines), figsize=(2.4 * len(lines) + 1, 3), sharey=True, squeeze=False
    )
    for (T, panel), ax in zip(sorted(lines.items()), axes[0], strict=True):
        for provider, points in panel.items():
            style = {"color": "0.6", "linestyle": ":"} if provider == "floor" else {"marker": "o"}
            if provider == "ours":
                style |= {"color": "k", "linewidth": 2.5, "alpha": 0.35}
            label = METHODS.get(provider, provider)
            ax.plot(*zip(*sorted(points.items()), strict=True), label=label, markersize=3, **style)
        ax.set(xscale="log", yscale="log", xlabel="channels", title=f"T = {T}", xlim=(20, 1e5))
    most = max(range(len(lines)), key=lambda k: len(lines[sorted(lines)[k]]))
    axes[0][most].legend(fontsize=5)
    axes[0][0].set_ylabel("flash_gru forward, fp32, ms")
    save(figure, path.with_name(f"{path.stem}-diagonal-crossover.svg"))


def draw_lengths(path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), sharey=True)
    for which, title, ax in zip(
        ("length-forward-ms", "length-train-ms"),
        ("forward", "forward + backward"),
        axes,
        strict=True,
    ):
        rows = studies(path, which)
        for provider in dict.fromkeys(row["provider"] for row in rows):
            points = [(int(r["T"]), float(r["value"])) for r in rows if r["provider"] == provider]
            ax.plot(*zip(*points, strict=True), label=provider, marker="o", markersize=3)
        ax.set(xscale="log", yscale="log", xlabel="length", ylabel="ms", title=title)
    axes[0].legend()
    save(figure, path.with_name(f"{path.stem}-lengths.svg"))


def draw_residuals(path: Path) -> None:
    rows = studies(path, "residual")
    lengths = sorted({int(row["T"]) for row in rows})
    figure, axes = plt.subplots(1, len(lengths), figsize=(2.6 * len(lengths) + 1, 3), sharey=True)
    for T, ax in zip(lengths, axes, strict=True):
        for regime in dict.fromkeys(row["regime"] for row in rows):
            values = [float(r["value"]) for r in rows if r["regime"] == regime and int(r["T"]) == T]
            ax.plot(range(1, len(values) + 1), values, label=regime, marker="o", markersize=2)
        ax.set(yscale="log", xlabel="Newton iteration", title=f"T = {T}", ylim=(1e-8, 10))
    axes[0].set_ylabel("largest residual before it")
    axes[-1].legend(fontsize=5)
    save(figure, path.with_name(f"{path.stem}-residuals.svg"))


def draw_chunks(path: Path) -> None:
    """Draws iterations and time of multiple shooting over the chunk size."""
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3))
    for study, label, ax in zip(
        ("chunk-iterations", "chunk-ms"), ("Newton iterations", "ms"), axes, strict=True
    ):
        rows = studies(path, study)
        for regime in dict.fromkeys(row["regime"] for row in rows):
            points = [(int(r["chunk"]), float(r["value"])) for r in rows if r["regime"] == regime]
            ax.plot(*zip(*points, strict=True), label=regime, marker="o", markersize=3)
        ax.set(xscale="log", xlabel="steps of a chunk", ylabel=label)
    axes[1].set(yscale="log")
    axes[0].legend()
    save(figure, path.with_name(f"{path.stem}-chunks.svg"))


def draw_studies(path: Path) -> None:
    draw_lengths(path)
    draw_residuals(path)
    draw_chunks(path)
