"""Tests several loaders in one process, as exported models bring their own, and processes that
fork."""

import threading

import pytest

pytestmark = pytest.mark.hub
CPU = {"backend": "cpu"}
OTHER = """
from other.hub import kernel_loader
kernel = kernel_loader.load_kernel("fused-rnn", "cpu", "cpu")
assert kernel.lstm(3) == 6, kernel
"""
FORK = """
import os, signal, threading, time
from flat.hub import kernel_loader

load = lambda: kernel_loader.load_kernel("fused-rnn", "cpu", "cpu").lstm(3)
thread = threading.Thread(target=load)
thread.start()
while not os.path.exists("{asked}"):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits for ever
    os._exit(0 if load() == 6 else 1)
thread.join()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
"""


@pytest.fixture
def copied(chain):
    (chain.folder / "other").symlink_to(chain.folder / "flat")
    return chain


@pytest.mark.parametrize("cache", ["cache", "file/cache"])
def test_another_copy_of_the_loader_takes_the_module_that_is_there(copied, cache):
    """A module that is imported is used again: its files were verified, even if they are gone."""
    (copied.folder / "file").touch()  # so that no folder can be made below it
    outcomes = copied.load(CPU, CPU | {"run": OTHER}, HF_HUB_CACHE=copied.folder / cache)
    assert [outcome["value"] for outcome in outcomes] == [2.0, 2.0]


def test_another_copy_with_another_lock_is_refused(copied, project, tmp_path):
    lock = (copied.folder / "lock.py").read_text()
    line = next(line for line in lock.splitlines() if "cells.py" in line)
    digest = line.split('"')[3]
    (tmp_path / "lock.py").write_text(lock.replace(digest, "0" * 64))
    run = f"import os; os.environ['FLASHCELL_LOCK'] = {str(tmp_path / 'lock.py')!r}\n"
    run += "import pytest\nfrom other.hub import kernel_loader\n"
    run += "with pytest.raises(kernel_loader.KernelCorrupt):\n"
    run += "    kernel_loader.load_kernel('fused-rnn', 'cpu', 'cpu')\n"
    assert copied.load(CPU, CPU | {"run": run})[0]["value"] == 2.0


def test_a_child_that_is_forked_during_a_load_has_the_kernel(chain, tmp_path):
    apply, asked = chain.hub.faults.apply, tmp_path / "asked"

    def slow(method: str, path: str, content: bytes) -> tuple[bytes, int]:
        if path.endswith(".so"):
            asked.touch()
            threading.Event().wait(1.0)
        return apply(method, path, content)

    chain.hub.faults.apply = slow
    assert chain.load(CPU | {"run": FORK.replace("{asked}", str(asked))})[0]["value"] == 2.0
