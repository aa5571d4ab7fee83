"""Tests scripts/check_cuda without a GPU, with a fake program in the sanitizer's place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    """The sanitizer runs in a session of its own, and would otherwise outlive the script."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\nsleep 300 &\necho $$ $! > {tmp_path}/started; wait\n")
    sanitizer.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FLASHCELL_TEST_KERNEL": "/"}
    command = [sys.executable, str(ROOT / "scripts/check_cuda"), "--kernel", "fused-rnn"]
    command += ["--engine", "step", "--cell", "lstm", "--tool", "memcheck"]
    process = subprocess.Popen(command, env=env)
    started = tmp_path / "started"
    wait_for(lambda: started.exists() and len(started.read_text().split()) == 2)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    left = started.read_text().split()
    wait_for(lambda: not any(is_running(int(pid)) for pid in left))


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while it was read
        return False
