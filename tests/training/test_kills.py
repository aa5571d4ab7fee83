"""Tests that scripts/train, killed at random moments or with damaged files, continues correctly or
says what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from commands import environment
from train_cases import text_recipe, write_recipe, write_text


def work(folder: Path, script: str, *words: str, **changes) -> str:
    """Returns what a worker reports about runs of a small recipe."""
    text = write_text(folder / "text")
    changes = {"checkpoint_every": 1, "evaluate_every": 5, "precision": "no", **changes}
    write_recipe(folder / "tiny.yaml", **text_recipe(text, **changes))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), folder, *words],
        capture_output=True, text=True,
        env=environment(OMP_NUM_THREADS="1", HF_HOME=str(folder / "huggingface")),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_no_kill_is_seen_in_the_end(tmp_path, kills):
    assert f"{kills} kills" in work(tmp_path, "kill_worker.py", str(kills), "1", steps=20)


@pytest.mark.slow
def test_damaged_files_are_named_and_the_checkpoint_before_is_taken(tmp_path):
    assert "damaged runs" in work(tmp_path, "damage_worker.py", steps=20)
