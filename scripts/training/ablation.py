"""Runs the gate ablation of train --ablation gates: input-gate biases and norm epsilons of an mLSTM
(arXiv 2503.14376, appendix E.2, figures 8 to 10).

Input-gate bias 0, -2, -5, -10, learnable or fixed at that, and the head norm's epsilon 1e-6 or 1e-2:
16 runs, each a run of its own under <home>/runs, killed and resumed as any; their curves and the
spikes of their gradients in <home>/runs/NAME-gates.csv.
"""

import csv
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

BIASES = (0.0, -2.0, -5.0, -10.0)
EPSILONS = (1e-6, 1e-2)
COLUMNS = ["input_gate_bias", "learnable", "norm_eps", "held_out_loss", "train_loss"]
COLUMNS += ["gradient_norm_median", "gradient_norm_max"]


def run_gates(args, recipe, home: Path) -> None:
    kind = recipe.model.get("model_type")
    if kind != "flash_mlstm":
        raise ValueError(f"--ablation gates is for flash_mlstm, but the recipe is for {kind}")
    rows = []
    for bias, learnable, eps in itertools.product(BIASES, (True, False), EPSILONS):
        name = f"{recipe.name}-gates{bias:g}-{'learnable' if learnable else 'fixed'}-{eps:g}"
        changes = {
            "name": name,
            "model.input_gate_bias_init": bias,
            "model.learnable_input_gate": learnable,
            "model.norm_eps": eps,
        }
        print(f"ablation: {name}", flush=True)
        if subprocess.run(command(changes)).returncode:
            raise ValueError(f"the run {name} failed (see above); go on with --resume")
        rows.append([bias, learnable, eps, *summary(home / "runs" / name / "training_log.csv")])
        table = home / "runs" / f"{recipe.name}-gates.csv"
        with open(table, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"done: {table}")


def command(changes: dict) -> list[str]:
    """Returns this command line without --ablation, with `changes` to the recipe."""
    words = sys.argv[1:]
    at = next(i for i, word in enumerate(words) if word.startswith("--ablation"))
    del words[at : at + (1 if "=" in words[at] else 2)]
    for key, value in changes.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    if "--here" not in words:
        words.append("--here")  # the environment is entered already
    return [sys.executable, sys.argv[0], *words]


def summary(log: Path) -> list[str]:
    with open(log, newline="") as file:
        rows = list(csv.DictReader(file))
    norms = [float(row["gradient_norm"]) for row in rows]
    held_out = [row["held_out_loss"] for row in rows if row["held_out_loss"]]
    middle, largest = statistics.median(norms), max(norms)
    return [held_out[-1], rows[-1]["train_loss"], f"{middle:.4g}", f"{largest:.4g}"]
