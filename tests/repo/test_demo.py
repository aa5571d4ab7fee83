"""Tests scripts/demo from end to end: build, publish, fetch, load the shipped checkpoint, generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def demo(home: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [ROOT / "scripts/demo", "--here", "--home", home, *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("FLASHCELL_LOCK", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.hub
def test_first_run_fetches_and_second_run_is_cached(tmp_path, fused_rnn):
    for origin in ("fetched from http://127.0.0.1:", "cached, published on http://127.0.0.1:"):
        done = demo(tmp_path, "--max-new-tokens", "40", "def read_")
        assert done.returncode == 0, done.stderr
        assert "kernel  flashcell/fused-rnn@" in done.stdout
        assert origin in done.stdout
        assert "\ndef read_" in done.stdout
        assert "40 tokens in" in done.stdout
        assert "Warning" not in done.stderr  # such as that the reference is used


def test_the_real_hub_is_not_pretended(tmp_path):
    done = demo(tmp_path, "--hub")
    assert done.returncode == 1
    assert "flashcell/fused-rnn is unpublished" in done.stderr
    assert "Traceback" not in done.stderr
    assert "tokens/s" not in done.stdout


def test_a_missing_model_is_named(tmp_path):
    done = demo(tmp_path, "--model", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert f"{tmp_path}/nothing is no folder, but must be a model's folder" in done.stderr
