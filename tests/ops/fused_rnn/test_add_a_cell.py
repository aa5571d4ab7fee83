"""Tests the recipe "add a cell": a fifth cell is its header, its reference, and its name in a list.

The minimal gated unit joins a copy of the kernel, the copy is built for the CPU, and the whole op
contract runs on it in a process of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CELLS = ROOT / "tests/cells"
CONTRACT = ["test_sequence.py", "test_contract.py", "test_registration.py"]


def test_the_cell_is_small():
    lines = sum(len((CELLS / f).read_text().strip().splitlines()) for f in ("mgu.h", "mgu.py.txt"))
    assert lines <= 60


def test_the_page_shows_the_cell_that_is_tried():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert textwrap.dedent(block).strip() == (CELLS / "mgu.py.txt").read_text().strip()


@pytest.mark.slow
def test_mgu_passes_the_op_contract(tmp_path):
    ignore = shutil.ignore_patterns("build", "__pycache__")
    for folder in ("kernel_builds", "modeling", "configuration", "scripts", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    kernel = tmp_path / "kernel_builds/fused-rnn"
    shutil.copy(CELLS / "mgu.h", kernel / "csrc/cells/mgu.h")
    listed = kernel / "csrc/cells/all.h"
    text = listed.read_text().replace('#include "lstm.h"', '#include "lstm.h"\n#include "mgu.h"')
    listed.write_text(re.sub(r"CellList<Lstm, ", "CellList<Lstm, Mgu, ", text))
    with open(kernel / "torch-ext/fused_rnn/cells.py", "a") as cells:
        cells.write((CELLS / "mgu.py.txt").read_text())

    site = tmp_path / "site"  # the copy's package comes before the one in which this test runs
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "FLASHCELL_TEST_DEVICE": "cpu"}
    env.pop("FLASHCELL_TEST_KERNEL", None)
    run = lambda *command: subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    done = run(*install, "--target", str(site), str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    files = [f"tests/ops/fused_rnn/{name}" for name in CONTRACT]
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", "mgu")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) >= 100, f"only {passed[1]} tests ran on the fifth cell"
