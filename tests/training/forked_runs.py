"""Runs scripts/train in forks of this process, which has imported everything, so each starts at
once."""

import os
import resource
import runpy
import sys
import time
import traceback
from pathlib import Path

import accelerate  # noqa: F401
import datasets
import transformers  # noqa: F401

import flashcell  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
datasets.disable_progress_bars()


def start(folder: Path, home: str, *options: str, largest_file: int = -1) -> int:
    """Starts the process of a run, which cannot write more than `largest_file` bytes into one file."""
    process = os.fork()
    if process:
        return process
    with open(folder / f"{home}.txt", "a") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    if largest_file >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    places = ["--here", "--backend", "reference", "--home", str(folder / home)]
    sys.argv = ["train", str(folder / "tiny.yaml"), *places, "--threads", "1", *options]
    status = 1
    try:
        runpy.run_path(str(ROOT / "scripts/train"), run_name="__main__")
        status = 0
    except SystemExit as error:
        print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process: int) -> int:
    """Waits for the process, and returns its exit status."""
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def finish(folder: Path, home: str, *options: str) -> float:
    """Returns the seconds of a run that is not killed."""
    started = time.monotonic()
    assert wait(start(folder, home, *options)) == 0, (folder / f"{home}.txt").read_text()[-2000:]
    return time.monotonic() - started


def results(folder: Path, home: str) -> list[bytes]:
    run = folder / home / "runs/tiny"
    rows = (run / "training_log.csv").read_text().splitlines()
    curve = "\n".join(row.rpartition(",")[0] for row in rows)  # without the seconds
    weights = (run / "model/model.safetensors").read_bytes()
    return [curve.encode(), (run / "monitors.csv").read_bytes(), weights]
