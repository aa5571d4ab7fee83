"""Fixtures: the models of model_cases.py, on the CPU binaries of this tree or of LOCAL_KERNELS."""

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from model_cases import CASES, VOCABULARY

KERNELS = {"fused-rnn": "fused_rnn", "diagonal-rnn": "diagonal_rnn", "tfla": "tfla"}


@pytest.fixture(params=CASES)
def case(request) -> str:
    return request.param


@pytest.fixture
def make_config():
    def make(case: str = "lstm", **changes) -> PreTrainedConfig:
        return CASES[case].config(**changes)

    return make


@pytest.fixture
def make_model():
    def make(case: str = "lstm", head: str = "ForCausalLM", **changes) -> PreTrainedModel:
        return CASES[case].model(head, **changes)

    return make


@pytest.fixture
def tokens():
    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape)

    return draw


@pytest.fixture(params=[False, True], ids=["read at once", "read late"])
def read_at_once_and_late(request, monkeypatch):
    """Runs a test with both ways in which a Batcher reads its tokens, on any device."""
    from flashcell import Batcher

    begin = Batcher.__init__

    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.ahead = request.param

    monkeypatch.setattr(Batcher, "__init__", __init__)


@pytest.fixture(autouse=True)
def binaries(request, monkeypatch):
    """The kernels, found in the way that a developer's model finds them."""
    if "LOCAL_KERNELS" not in os.environ:
        built = {k: request.getfixturevalue(fixture).__file__ for k, fixture in KERNELS.items()}
        entries = [f"flashcell/{kernel}={Path(file).parent}" for kernel, file in built.items()]
        monkeypatch.setenv("LOCAL_KERNELS", ":".join(entries))


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """Takes the tables of costs away from backend="auto", so that our kernels run whatever they say.

    test_backend_choice.py tests the choice, and torch.nn's forward where it is chosen."""
    from flashcell.choice import backend_choice, cost_tables

    monkeypatch.setattr(cost_tables, "_tables", [[], []])
    monkeypatch.setattr(backend_choice, "_decided", {})


@pytest.fixture
def use_costs(tmp_path, monkeypatch, kernels_alone):
    """Lets backend="auto" decide by a user's table with the content given; returns its path."""
    from flashcell.choice import backend_choice, cost_tables

    def use(content: bytes) -> str:
        path = tmp_path / "tuned.json"
        path.write_bytes(content)
        monkeypatch.setenv("FLASHCELL_TUNED", str(path))
        monkeypatch.setattr(cost_tables, "_tables", [])
        monkeypatch.setattr(backend_choice, "_decided", {})
        monkeypatch.setattr(backend_choice, "_devices", {})
        return str(path)

    monkeypatch.setattr(backend_choice, "VECTORS", {"AVX512": 512, "AVX2": 512, "DEFAULT": 512})
    return use
