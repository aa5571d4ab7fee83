"""Makes the tables of training steps, several GPUs, and loss curves from scripts/results."""

import csv
import math
import re
from collections import defaultdict
from pathlib import Path

Row = dict[str, str]
Curve = list[float]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def stamp(path: Path, rows: list[Row]) -> str:
    commits = sorted({f"{row['commit']} of {row['date']}" for row in rows})
    return (
        f"{rows[0]['device']}, torch {rows[0]['torch']}, commit {', '.join(commits)} "
        f"(all columns: `scripts/results/{path.name}`):\n\n"
    )


def spread(row: Row) -> str:
    return f"{row['p50_ms']}, {row['p95_ms']}, {row['max_ms']}"


def training_table(path: Path) -> str:
    """Makes the table of training steps: the newest run of every case, with missed targets in bold.

    Below it, the same model with peers' layers and with ours, from one run."""
    runs: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    peers: dict[
        tuple[str, str], tuple[Row, Row]
    ] = {}  # a peer's row, and our last row above it in the file
    for row in read(path):
        case = row["case"], row["compiled"]
        if row["provider"] in ("ours", "transformer"):
            runs[case][row["provider"]] = row
        else:
            peers[row["case"], row["provider"]] = row, runs[case]["ours"]
    rows = [row for providers in runs.values() for row in providers.values()]
    text = stamp(path, rows + [row for row, _ in peers.values()])
    text += (
        "| model | B x T | a step, ms: p50, p95, most | the Transformer's | ratio | target | tokens/s "
        "| TFLOP/s | GiB, both |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    for (case, compiled), providers in runs.items():
        ours, theirs = providers["ours"], providers["transformer"]
        beyond = "**" if float(ours["ratio"]) > float(ours["limit"]) else ""
        several = f"{ours['micro_steps']} x " if ours["micro_steps"] != "1" else ""
        text += (
            f"| {case}{', compiled' if compiled == 'True' else ''} | "
            f"{several}{ours['B']} x {ours['T']} | {spread(ours)} | {spread(theirs)} | "
            f"{beyond}{ours['ratio']}{beyond} | {ours['limit']} | {float(ours['tokens_s']):,.0f} | "
            f"{ours['tflops']} | {ours['peak_gib']}, {theirs['peak_gib']} |\n"
        )
    if peers:
        text += (
            "\n| model | its cells by | a step, ms: p50, p95, most | by ours, in that run | times "
            "ours | GiB, both |\n|---|---|---|---|---|---|\n"
        )
    for (case, peer), (row, ours) in peers.items():
        times = float(row["p50_ms"]) / float(ours["p50_ms"])
        text += (
            f"| {case} | {peer} | {spread(row)} | {spread(ours)} | {times:.2f} | "
            f"{row['peak_gib']}, {ours['peak_gib']} |\n"
        )
    return text


def parallel_table(path: Path) -> str:
    runs: dict[tuple[str, str], Row] = {(r["case"], r["provider"]): r for r in read(path)}
    text = stamp(path, list(runs.values()))
    text += (
        "| model | T | on | a step | one GPU's by it | target | gradients apart |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for (case, provider), row in runs.items():
        where = "one GPU" if provider == "alone" else f"{row['gpus']} GPUs, {provider}"
        target = "" if provider == "alone" else row["limit"]
        text += (
            f"| {case} | {row['T']} | {where} | {row['p50_ms']} ms | {row['ratio']} | {target} | "
        )
        text += f"{row['gap']} |\n"
    return text


def curves_of(rows: list[Row]) -> dict[tuple[str, str], Curve]:
    """Returns the loss curves by precision and variant."""
    curves: dict[tuple[str, str], Curve] = defaultdict(list)
    for row in rows:
        curves[row["precision"], row["provider"]].append(float(row["loss"]))
    return curves


def is_noise(provider: str) -> bool:
    """Whether a variant is a repeat of another with perturbed roundings."""
    return re.search(r"(nudged|reordered)-\d+$", provider) is not None


def apart(a: Curve, b: Curve) -> str:
    """Formats the root mean square of the difference of two curves."""
    return f"{math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)):.1e}"


def convergence_table(path: Path) -> str:
    """Makes the table of kernels against the reference by family, and that of torch.nn's LSTM."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read(path):
        groups[row["comparison"], row["family"]].append(row)
    kernels = {family: rows for (study, family), rows in groups.items() if study == "kernels"}
    text = stamp(path, [rows[0] for rows in groups.values()])
    text += (
        "| model | B x T, steps | last loss | kernel to reference, fp32 | noise | the same in bf16 | "
        "noise | bf16 to fp32 |\n|---|---|---|---|---|---|---|---|\n"
    )
    for family, rows in kernels.items():
        curves = curves_of(rows)
        size = f"{rows[0]['B']} x {rows[0]['T']}, {rows[-1]['step']}"
        line = [family, size, f"{curves['fp32', 'kernel'][-1]:.4f}"]
        for precision in ("fp32", "bf16"):
            kernel = curves[precision, "kernel"]
            again = [c for (p, s), c in curves.items() if p == precision and is_noise(s)]
            line.append(apart(kernel, curves[precision, "reference"]))
            line.append(max((apart(kernel, c) for c in again), key=float))
        line.append(apart(curves["bf16", "kernel"], curves["fp32", "kernel"]))
        text += f"| {' | '.join(line)} |\n"
    for family, rows in ((f, rows) for (study, f), rows in groups.items() if study == "nn-lstm"):
        curves = curves_of(rows)
        text += (
            f"\n{family}, {rows[0]['B']} x {rows[0]['T']}, {rows[-1]['step']} steps:\n\n"
            "| in the same model | last loss, fp32 | from flash_rnn | last loss, bf16 | "
            "from flash_rnn |\n|---|---|---|---|---|\n"
        )
        for provider in dict.fromkeys(provider for _, provider in curves if not is_noise(provider)):
            line = [provider]
            for precision in ("fp32", "bf16"):
                curve = curves.get((precision, provider))
                own = curves[precision, "flash_rnn"] if curve else []
                line += [f"{curve[-1]:.4f}", apart(curve, own)] if curve else ["", ""]
            text += f"| {' | '.join(line)} |\n"
        line = ["flash_rnn from other roundings"]
        for precision in ("fp32", "bf16"):
            own = curves[precision, "flash_rnn"]
            again = [c for (p, s), c in curves.items() if p == precision and is_noise(s)]
            line += ["", max((apart(own, c) for c in again), key=float)]
        text += f"| {' | '.join(line)} |\n"
    return text


TABLES = {
    "training": (training_table, "micro_steps"),
    "parallel": (parallel_table, "gpus"),
    "convergence": (convergence_table, "comparison"),
}
