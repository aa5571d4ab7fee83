"""What several of these tests load: scripts have no suffix, so no import finds them."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def plot(monkeypatch):
    """The module of scripts/plot_bench."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loader = importlib.machinery.SourceFileLoader("plot_bench", str(SCRIPTS / "plot_bench"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("plot_bench", loader))
    loader.exec_module(module)
    return module
