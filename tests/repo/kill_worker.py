"""Kills scripts/train at random moments: kill_worker.py FOLDER KILLS SEED.

Every run is a fork of this process, which has imported everything: a run starts at once, and the kills
fall on its work, not on imports. After each kill every file of the checkpoint must load, and the run
that is resumed to its end must have the whole run's curve and weights.
"""

import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import accelerate  # noqa: F401
import datasets
import torch
import transformers  # noqa: F401
from safetensors.torch import load_file

import flashcell  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
datasets.disable_progress_bars()


def start(folder: Path, home: str, *options: str) -> int:
    """The process of a run."""
    process = os.fork()
    if process:
        return process
    with open(folder / f"{home}.txt", "a") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    places = ["--here", "--backend", "reference", "--home", str(folder / home)]
    sys.argv = ["train", str(folder / "tiny.yaml"), *places, "--threads", "1", *options]
    status = 1
    try:
        runpy.run_path(str(ROOT / "scripts/train"), run_name="__main__")
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def finish(folder: Path, home: str, *options: str) -> float:
    """Seconds of a run that nobody kills."""
    started = time.monotonic()
    _, status = os.waitpid(start(folder, home, *options), 0)
    assert status == 0, (folder / f"{home}.txt").read_text()[-2000:]
    return time.monotonic() - started


def results(folder: Path, home: str) -> list[bytes]:
    run = folder / home / "runs/tiny"
    rows = (run / "training_log.csv").read_text().splitlines()
    curve = "\n".join(row.rpartition(",")[0] for row in rows)  # without the seconds
    weights = (run / "model/model.safetensors").read_bytes()
    return [curve.encode(), (run / "monitors.csv").read_bytes(), weights]


def check(checkpoints: Path) -> bool:
    """Loads every file of the newest checkpoint; False if there is none yet."""
    found = sorted(checkpoints.glob("step-*"))
    if not found:
        return False
    for file in found[-1].iterdir():
        if file.suffix == ".safetensors":
            load_file(file)
        else:
            torch.load(file, weights_only=False)
    assert len(list(found[-1].iterdir())) == 5, sorted(found[-1].iterdir())
    return True


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    longest = finish(folder, "whole")
    draw = random.Random(seed)
    checkpoints = folder / "broken/runs/tiny/checkpoints"
    seen = done = 0
    while done < kills:
        process = start(folder, "broken", "--resume")
        time.sleep(draw.uniform(0, longest))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            done += 1
            seen += check(checkpoints)
        else:  # it was through: that counts as no kill, and the next run begins anew
            assert os.WEXITSTATUS(status) == 0, (folder / "broken.txt").read_text()[-2000:]
            assert results(folder, "whole") == results(folder, "broken")
            finish(folder, "broken", "--restart", "--max-minutes", "0.0001")
    finish(folder, "broken", "--resume")
    assert results(folder, "whole") == results(folder, "broken")
    print(f"{done} kills, {seen} of them with a checkpoint to go on from")
    assert seen > kills // 4, "the kills came too early to mean anything"


if __name__ == "__main__":
    main()
