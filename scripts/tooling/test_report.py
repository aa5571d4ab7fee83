"""A pytest plugin: says how far the tests are, and in one line a reason what did not run.

scripts/test loads it. Instead of a dot for each test it writes the name of a test that fails, and
every twenty seconds a line with the share that is done and the time left. At the end it adds up the
tests that did not run, by reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import pytest

from tooling.progress import time_left

EVERY = 20.0  # seconds between two lines of progress
NEEDS_GPU = "need an NVIDIA GPU and FLASHCELL_TEST_DEVICE=cuda"
SLOW = "marked slow, `scripts/test --all` runs them"


def skipped_lines(reasons: Iterable[str], slow: int) -> list[str]:
    """Returns a line for each reason, the most frequent first."""
    count = Counter(NEEDS_GPU if about_a_gpu(reason) else reason for reason in reasons)
    count[SLOW] += slow
    return [f"{number:,} skipped: {reason}" for reason, number in count.most_common() if number]


def about_a_gpu(reason: str) -> bool:
    return any(word in reason for word in ("GPU", "CUDA", "=cuda"))


def progress_line(done: int, total: int, seconds: float) -> str:
    left = time_left(done, total, seconds)
    return f"{100 * done // total:3}%, {done:,} of {total:,} tests, {left}"


class Report:
    """Writes the lines; in pytest-xdist's workers it only counts the tests marked slow."""

    def __init__(self, config: pytest.Config):
        self.config, self.worker = config, hasattr(config, "workeroutput")
        self.slow = self.total = 0
        self.done: set[str] = set()
        self.started = self.said = time.monotonic()

    @property
    def terminal(self):
        return self.config.pluginmanager.getplugin("terminalreporter")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.slow += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_sessionfinish(self) -> None:
        if self.worker:
            self.config.workeroutput["slow"] = self.slow

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.slow = getattr(node, "workeroutput", {}).get("slow", self.slow)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total, self.started = len(ids), time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total, self.started = len(session.items), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.worker:
            self.terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.done.add(nodeid)
        now = time.monotonic()
        if not self.worker and self.total and now - self.said >= EVERY:
            self.said = now
            line = progress_line(len(self.done), self.total, now - self.started)
            self.terminal.write_line(line)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        reports = terminalreporter.stats.get("skipped", [])
        lines = skipped_lines((reason_of(report) for report in reports), self.slow)
        if lines:
            terminalreporter.section("tests that did not run")
        for line in lines:
            terminalreporter.write_line(line)


def reason_of(report: pytest.TestReport) -> str:
    """Returns why a test was skipped; pytest keeps it as (file, line, "Skipped: reason")."""
    found = report.longrepr
    text = found[2] if isinstance(found, tuple) else str(found)
    return text.removeprefix("Skipped: ").splitlines()[0]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config), "flashcell-report")
