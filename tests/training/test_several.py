"""Tests scripts/train in several processes (DDP, FSDP2), in the runs of an ablation, and against
transformers' Trainer."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import flashcell  # noqa: F401  registers the families
from commands import environment
from train_cases import TEXTS, text_recipe, write_recipe, write_text

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def run(*words, folder: Path, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True,
        env=environment(OMP_NUM_THREADS="1", HF_HOME=str(folder / "huggingface"),
                        CUDA_VISIBLE_DEVICES="", **variables),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


MLSTM = {"model_type": "flash_mlstm", "num_hidden_layers": 1, "hidden_size": 32, "num_heads": 2}
QUICK = {"precision": "no", "carry": False, "warmup": 1, "evaluate_every": 2, "steps": 2}
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def command(folder: Path, *options: object) -> list:
    places = ["--here", "--home", folder / "home", "--threads", "1", "--backend", "reference"]
    return [ROOT / "scripts/train", folder / "tiny.yaml", *places, *options]


def losses(folder: Path) -> list[float]:
    with open(folder / "home/runs/tiny/training_log.csv", newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def test_two_processes_take_the_steps_of_one(tmp_path):
    """The standard library's rows are the same for any number of processes, so the losses are too,
    but for the order of sums."""
    from training.corpus import Corpus, save_corpus

    files = tuple((f"{i}.py", text.encode()) for i, text in enumerate(TEXTS))
    save_corpus(Corpus(files, "3.11.7"), tmp_path / "corpus.zip")
    changes = {"precision": "no", "steps": 8, "micro_batch": 1, "evaluate_every": 4}
    write_recipe(tmp_path / "tiny.yaml", **changes)
    words = command(tmp_path, "--corpus", tmp_path / "corpus.zip", "--any-corpus", "--restart",
                    "--output", tmp_path / "card", "--tensorboard")  # fmt: skip
    curves = []
    for launch in ([], TWO):
        run(*launch, *words, folder=tmp_path)
        curves.append(losses(tmp_path))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][-1] < curves[0][0]
    assert list((tmp_path / "home/runs/tiny/tensorboard").iterdir())


def test_shards_take_the_steps_of_whole_models_and_go_on(tmp_path):
    """FSDP2 makes the same steps as DDP: one with a shard for each block, the others with one shard
    for the whole model."""
    text = write_text(tmp_path / "text")
    changes = {**QUICK, "steps": 5, "evaluate_every": 5, "model": MLSTM, "micro_batch": 1}
    write_recipe(tmp_path / "tiny.yaml", **text_recipe(text, **changes))
    script, *words = command(tmp_path)
    run(*TWO, script, *words, "--restart", folder=tmp_path)
    whole = losses(tmp_path)
    sharded = [*TWO, Path(__file__).with_name("fsdp_worker.py"), *words, "--strategy", "fsdp2"]
    run(*sharded, "--restart", "--max-minutes", "0.0001", folder=tmp_path, BY_BLOCKS="1")
    assert len(losses(tmp_path)) == 1
    run(*sharded, "--resume", folder=tmp_path)
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "home/runs/tiny/model")
    assert model.config.model_type == "flash_mlstm"


def test_one_damaged_file_takes_all_processes_back(tmp_path):
    text = write_text(tmp_path / "text")
    changes = {**QUICK, "steps": 4, "evaluate_every": 4, "checkpoint_every": 1}
    write_recipe(tmp_path / "tiny.yaml", **text_recipe(text, **changes))
    words = [*TWO, *command(tmp_path)]
    run(*words, "--restart", folder=tmp_path)
    whole = losses(tmp_path)
    checkpoints = sorted((tmp_path / "home/runs/tiny/checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000003", "step-00000004"]
    os.truncate(checkpoints[1] / "process-1.pt", 9)
    run(*words, "--resume", folder=tmp_path)
    assert losses(tmp_path) == whole


def test_the_ablation_of_gates_is_a_table(tmp_path, monkeypatch):
    """The corners of the grid."""
    from training import ablation
    from training.recipe import Recipe

    assert set(ablation.BIASES) == {0, -2, -5, -10}
    monkeypatch.setattr(ablation, "BIASES", (0.0, -10.0))
    monkeypatch.setattr(ablation, "EPSILONS", (1e-6,))
    text = write_text(tmp_path / "text")
    path = write_recipe(tmp_path / "tiny.yaml", **text_recipe(text, model=MLSTM, **QUICK))
    words = [str(word) for word in command(tmp_path, "--ablation", "gates")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    ablation.run_gates(None, Recipe.read(path, []), tmp_path / "home")
    with open(tmp_path / "home/runs/tiny-gates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    grid = [(row["input_gate_bias"], row["learnable"]) for row in rows]
    assert grid == [(b, l) for b in ("0.0", "-10.0") for l in ("True", "False")]
    assert all(float(row["held_out_loss"]) > 0 for row in rows)
    assert len({row["held_out_loss"] for row in rows}) >= 3


def test_the_trainer_example_trains(tmp_path):
    text = write_text(tmp_path / "text")
    options = {"output_dir": tmp_path / "model", "max_steps": 3, "report_to": "none",
               "per_device_train_batch_size": 4, "use_cpu": True}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    run(ROOT / "scripts/recipes/with_trainer.py", text, *words, folder=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "flash_rnn"
