"""scripts/test says how far the tests are, and why tests did not run."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tooling.test_report import EVERY, Report, progress_line, skipped_lines

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.skip(reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
@pytest.mark.parametrize("i", range(1200))
def test_gpu(i): pass

@pytest.mark.skip(reason="about CUDA's kernel")
def test_kernel(): pass

def test_package(): pytest.importorskip("no_such_package")

@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_slow(i): pass

@pytest.mark.parametrize("i", range(5))
def test_good(i): pass

def test_bad(): assert False
"""


@pytest.mark.parametrize("jobs", ["0", "2"])
def test_reasons_are_added_up_and_a_failure_is_named_at_once(tmp_path, jobs):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    command = [sys.executable, ROOT / "scripts", "pytest", "-n", jobs, "-m", "not slow", "-rfE"]
    command += ["-o", "console_output_style=classic", "-p", "tooling.test_report", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("1,201 skipped: need an NVIDIA GPU and FLASHCELL_TEST_DEVICE=cuda") == 1
    assert "3 skipped: marked slow, `scripts/test --all` runs them" in lines
    assert [line for line in lines if "1 skipped: could not import 'no_such_package'" in line]
    first = lines.index("FAILED test_it.py::test_bad (call)")
    assert first < next(i for i, line in enumerate(lines) if "FAILURES" in line)
    assert "1 failed, 5 passed, 1202 skipped" in lines[-1]
    assert "....." not in done.stdout


def test_the_time_left():
    assert progress_line(250, 1000, 100.0) == " 25%, 250 of 1,000 tests, 5 minutes left"
    assert progress_line(999, 1000, 100.0) == " 99%, 999 of 1,000 tests, 0 seconds left"


def test_a_line_of_progress_is_written_from_time_to_time():
    lines: list[str] = []
    terminal = SimpleNamespace(write_line=lines.append)
    plugins = SimpleNamespace(getplugin=lambda name: terminal)
    report = Report(SimpleNamespace(pluginmanager=plugins))
    report.pytest_xdist_node_collection_finished(["a", "b", "c", "d"])
    report.pytest_runtest_logfinish("a")
    assert not lines
    report.said -= EVERY
    report.pytest_runtest_logfinish("b")
    report.pytest_runtest_logfinish("c")
    (line,) = lines
    assert line.startswith(" 50%, 2 of 4 tests, ")


def test_the_most_frequent_reason_comes_first():
    assert skipped_lines(["rare", "often", "often"], 0) == ["2 skipped: often", "1 skipped: rare"]
    assert skipped_lines([], 0) == []
