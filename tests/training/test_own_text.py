"""scripts/train on a user's own text: what it leaves, what it says, and what it refuses."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import environment, load_command
from repo_checks import pages
from tooling.progress import time_left
from train_cases import RECIPE, text_recipe, write_recipe, write_text
from training.documents import DatasetTexts, local_text
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


@pytest.mark.slow
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


BINARY = b"ab\xb8\0" * 99


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.txt": b""}, "but must hold text: {0} is empty"),
        ({"a.txt": BINARY}, "but {0} is not text in UTF-8: invalid start byte, byte 0xb8 at"),
        ({"a.txt": b"text", "b.bin": BINARY}, "but {1} is not text in UTF-8: invalid start byte"),
    ],
    ids=["empty", "binary", "one is binary"],
)
def test_what_is_no_text_is_named(tmp_path, monkeypatch, files, said):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "text").mkdir()
    paths = [tmp_path / "text" / name for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.write_bytes(content)
    text = tmp_path / "text" if len(paths) > 1 else paths[0]
    recipe = Recipe(**{**RECIPE, "corpus_sha256": "", "data": local_text(text)})
    with pytest.raises(ValueError, match=r"^--text is ") as refused:
        load_command("train").open_texts(SimpleNamespace(text=text), recipe, None, tmp_path / "t")
    assert str(refused.value).startswith(f"--text is {text}, {said.format(*paths)}")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^data is \{'path': 'text', .* (is empty|not text) ?"):
        load_command("train").open_texts(SimpleNamespace(text=None), recipe, None, tmp_path / "t")


def test_text_that_is_all_held_out_is_refused_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = Recipe(**text_recipe(write_text(tmp_path / "text"), held_out_in=2))
    texts = DatasetTexts(recipe, tmp_path / "tokenizer")
    before = texts.state()["documents"]
    texts.check()
    assert texts.documents.state == before
    texts.documents.recipe = replace(recipe, held_out_in=1)
    with pytest.raises(ValueError, match="data has no training document for process 0"):
        texts.check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--text", "bad.txt"], "bad.txt is not text in UTF-8"),
        pytest.param(
            ["--text", "text", "--set", "model={model_type: mamba}", "--set", "carry=false"],
            "train: isolate is true, but must be false: mamba lets documents of a row see",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["text", "model"],
)
def test_a_restart_that_cannot_begin_keeps_the_run_before(tmp_path, options, said):
    write_text(tmp_path / "text")
    (tmp_path / "bad.txt").write_bytes(BINARY)
    write_recipe(tmp_path / "tiny.yaml", **QUICK)
    weights = tmp_path / "home/runs/tiny/model/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("weights")
    done = train(tmp_path, "--restart", *options)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert weights.read_text() == "weights"
    assert [path.name for path in (tmp_path / "home/runs/tiny").iterdir()] == ["model"]


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
