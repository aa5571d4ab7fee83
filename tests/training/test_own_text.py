"""scripts/train on a user's own text: what it leaves, what it says, and what it refuses."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commands import environment
from repo_checks import pages
from tooling.progress import time_left
from train_cases import text_recipe, write_recipe, write_text
from training.documents import DatasetTexts
from training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"precision": "no", "steps": 4, "warmup": 1, "evaluate_every": 2, "log_every": 2}


def train(folder: Path, *options: object, launch: tuple = (), **variables: str):
    places = ["--here", "--home", folder / "home", "--threads", "1", "--backend", "reference"]
    script = [*launch, ROOT / "scripts/train", folder / "tiny.yaml", *places, *options]
    return subprocess.run(
        [sys.executable, *map(str, script)], capture_output=True, text=True, cwd=folder,
        env=environment(HF_HOME=str(folder / "huggingface"), CUDA_VISIBLE_DEVICES="", **variables),
    )  # fmt: skip


def test_a_run_leaves_a_card_and_a_curve_and_says_the_time_left(tmp_path):
    write_text(tmp_path / "text")
    write_recipe(tmp_path / "tiny.yaml", **QUICK)
    done = train(tmp_path, "--text", tmp_path / "text")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    assert all(line.endswith("seconds left") for line in lines)
    model = tmp_path / "home/runs/tiny/model"
    assert (model / "curve.png").read_bytes().startswith(b"\x89PNG")
    card = (model / "README.md").read_text()
    assert "trained by `scripts/train` of flashcell on local text" in card
    assert "$" not in card
    with open(model / "training_log.csv", newline="") as file:
        *_, last = csv.DictReader(file)
    assert f"**{float(last['held_out_bits_per_byte']):.4f}**" in card
    program = card.replace('"tiny"', f'"{model}"')
    assert not list(pages.failures(tmp_path, lambda name: program, ["README.md"]))


def test_few_files_end_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = Recipe(**text_recipe(write_text(tmp_path / "text"), held_out_in=10**6))
    said = r"no document of 24 is held out, .* held_out_in is 1000000: .* --set held_out_in=2"
    with pytest.raises(ValueError, match=said):
        DatasetTexts(recipe, tmp_path / "tokenizer")
    recipe.data["streaming"] = True
    with pytest.raises(ValueError, match="no document is held out, but one must be"):
        DatasetTexts(replace(recipe), tmp_path / "tokenizer")


@pytest.mark.parametrize(
    "launch",
    [
        (),  # no launcher, but the variables that accelerate sets
        pytest.param(
            ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["variables", "accelerate"],
)
def test_one_process_instead_of_two_is_refused(tmp_path, launch):
    write_text(tmp_path / "text")
    write_recipe(tmp_path / "tiny.yaml", **QUICK)
    variables = {} if launch else {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    done = train(tmp_path, "--text", tmp_path / "text", launch=launch, **variables)
    assert done.returncode == 1
    assert "accelerate launch has started one process, not as many" in done.stderr
    assert f"torchrun --nproc-per-node 2 {ROOT}/scripts/train" in done.stderr
    assert not (tmp_path / "home/runs/tiny/checkpoints").exists()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1, "3 seconds left"),
        (100, "5 minutes left"),
        (20, "1 minute left"),
        (3600, "3.0 hours left"),
    ],
)
def test_the_time_left(seconds, said):
    assert time_left(1, 4, seconds) == said
