"""Tests the choice whether layers run side by side on CUDA, in chunks of time: csrc/cuda/stack/plan.h."""

import csv
import math
import re
import subprocess
import sys

import pytest
import torch

from cases import DEVICE
from commands import ROOT, environment

H200 = (
    90,
    90,
    True,
    132,
    232448,
)  # arch, arch of the code, whether it is sm_90a, SMs, shared memory


def test_plan(fused_rnn):
    """Few sequences of many steps run side by side; what fills the GPU alone, or is short, does not."""
    plan = fused_rnn.dispatch.ops.plan_layers
    ask = lambda L, B, T, D, saves=False, cell="lstm", e=2, tf32=False: plan(
        cell, L, saves, B, T, D, e, tf32, *H200
    )
    for saves in (False, True):
        assert 32 <= ask(4, 16, 1024, 768, saves) <= 160
        assert 32 <= ask(3, 16, 1024, 512, saves, "gru") <= 160
        assert ask(4, 1, 1000, 256, saves, e=4, tf32=True) > 0
        assert ask(4, 1, 1000, 128, saves, e=4) > 0
        assert ask(1, 16, 1024, 768, saves) == 0
        assert ask(4, 1, 4_000_000, 256, saves) == 0  # 8 GB of outputs
        assert ask(4, 16, 16, 768, saves) == 0
        assert ask(4, 1024, 1024, 1024, saves) == 0
        assert ask(2, 64, 500, 512, saves, e=4) > 40  # exact fp32, as a graph
        assert ask(2, 4, 500, 512, saves, e=4) == 0  # with products of cuBLAS
    explain = fused_rnn.explain_layers
    for training in (False, True):
        told = explain("lstm", 4, 768, 16, "bfloat16", "H200", training=training)
        assert told == ask(4, 16, 1024, 768, training) > 0
    call = "lstm", 4, 256, 1, "float32", "H200", 1000
    assert explain(*call, precision="tf32") == ask(4, 1, 1000, 256, e=4, tf32=True)
    assert explain("lstm", 4, 768, 16, "bfloat16", "H200", 16) == 0
    with pytest.raises(ValueError, match="layers is 0, but must be an int >= 1"):
        explain("lstm", 0, 768, 16, "bfloat16", "H200")
    with pytest.raises(RuntimeError, match="element_bytes is 3"):
        ask(4, 16, 1024, 768, e=3)
    with pytest.raises(RuntimeError, match="layers is 0"):
        ask(0, 16, 1024, 768)


def measured_modules():
    """Returns the modules whose times were measured on an H200: their sizes, and ms by chunk."""
    with open(ROOT / "scripts/results/nvidia-h200-chunks.csv") as file:
        for row in csv.DictReader(file):
            times = {
                int(key.split("_")[1]) if key != "alone_ms" else 0: float(row[key])
                for key in row
                if key.endswith("_ms") and row[key]
            }
            yield row, times


def plan_chunks(*arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/plan_chunks", *arguments],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
def test_modules_are_measured(tmp_path):
    """scripts/plan_chunks times modules one layer after the other, and in chunks."""
    path = tmp_path / "chunks.csv"
    plan_chunks("--measure", "0.1", "--file", path)
    rows = list(csv.DictReader(path.open()))
    assert {row["mode"] for row in rows} == {"inference", "training"}
    assert all(float(row["alone_ms"]) > 0 for row in rows)


def test_fitted_times_are_near_the_measured_ones():
    pattern = r"^(\w+ \w+): \{\{.*\}.*\n.*median error (\d+)%, of plan.h's costs (\d+)%$"
    found = re.findall(pattern, plan_chunks(), re.M)
    engines, modes = ("block", "cluster", "grid", "gemm", "fma"), ("inference", "training")
    assert [name for name, *_ in found] == [f"{e} {m}" for e in engines for m in modes]
    for _, fitted, planned in found:
        assert int(fitted) <= 15
        assert abs(int(planned) - int(fitted)) <= 1


@pytest.mark.parametrize(
    ("mode", "worst", "slow", "mean"),
    [("inference", 0.58, 0.015, 1.12), ("training", 0.8, 0.025, 1.055)],
)
def test_plan_on_measured_times(fused_rnn, mode, worst, slow, mean):
    """The plan makes few measured modules slower, and their times shorter by the mean."""
    gains = []
    for row, times in measured_modules():
        if row["mode"] != mode:
            continue
        exact, narrow = row["precision"] == "exact", row["precision"] in ("bf16", "fp16")
        dtype = torch.bfloat16 if narrow else torch.float32
        width = fused_rnn.padding.padded_width("cuda", dtype, 2, int(row["width"]))
        sizes = (row["net"].replace("-", "_"), 1, width, int(row["batch"]), dtype, "H200")
        if exact and fused_rnn.explain_plan(*sizes, int(row["steps"])).engine == "wide":
            continue  # its times are of engines that no longer run it
        chunk = fused_rnn.dispatch.ops.plan_layers(
            row["net"].replace("-", "_"), int(row["layers"]), mode == "training",
            int(row["batch"]), int(row["steps"]), width, 2 if narrow else 4, not exact, *H200,
        )  # fmt: skip
        if chunk > 0:  # the measured chunk that is nearest
            chunk = min((c for c in times if c), key=lambda c: abs(math.log(c / chunk)))
        gains.append(times[0] / times[chunk])
    slower = sorted(gain for gain in gains if gain < 0.95)
    assert len(gains) > 500
    assert min(gains) > worst, slower
    assert len(slower) < slow * len(gains), slower
    assert math.exp(sum(map(math.log, gains)) / len(gains)) > mean
