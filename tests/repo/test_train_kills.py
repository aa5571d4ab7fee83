"""scripts/train, killed at random moments, leaves a whole checkpoint and goes on as if it had not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_cases import text_recipe, write_recipe, write_text


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_no_kill_is_seen_in_the_end(tmp_path, kills):
    text = write_text(tmp_path / "text")
    changes = {"steps": 20, "checkpoint_every": 1, "evaluate_every": 5, "precision": "no"}
    write_recipe(tmp_path / "tiny.yaml", **text_recipe(text, **changes))
    worker = [sys.executable, Path(__file__).with_name("kill_worker.py")]
    done = subprocess.run(
        [*worker, tmp_path, str(kills), "1"], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "huggingface")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{kills} kills" in done.stdout
