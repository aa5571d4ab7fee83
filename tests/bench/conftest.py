"""Fixtures of the tests of benchmarks and reports."""

import pytest

from commands import load_command


@pytest.fixture
def plot():
    """The module of scripts/plot_bench."""
    return load_command("plot_bench")
