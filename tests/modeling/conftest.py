"""Small models with large weights: every gate moves, and a wrong state shows in the logits.

They run the CPU binary of this tree, or whatever LOCAL_KERNELS names.
"""

import os
from pathlib import Path

import pytest
import torch

import flashcell

CELLS = [("lstm", "tanh"), ("gru", "tanh"), ("rnn", "tanh"), ("rnn", "relu"), ("slstm", "tanh")]


@pytest.fixture(params=CELLS, ids=lambda p: p[0] + ("-relu" if p[1] == "relu" else ""))
def every_cell(request) -> dict:
    return {"cell": request.param[0], "nonlinearity": request.param[1]}


@pytest.fixture
def make_config():
    def make(**changes) -> flashcell.FlashRNNConfig:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2}
        defaults = {"vocab_size": 61, "initializer_range": 0.3, **sizes}
        return flashcell.FlashRNNConfig(**{**defaults, **changes})

    return make


@pytest.fixture
def make_model(make_config):
    def make(**changes) -> flashcell.FlashRNNForCausalLM:
        model = flashcell.FlashRNNForCausalLM(make_config(**changes)).eval()
        with torch.no_grad():
            for layer in model.model.layers:  # biases that padding cannot hide behind
                layer.mixer.gate_bias.add_(torch.randn_like(layer.mixer.gate_bias))
        return model

    return make


@pytest.fixture
def tokens():
    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 61, shape)

    return draw


@pytest.fixture(autouse=True)
def binary(request, monkeypatch):
    """The kernel as a developer's model finds it."""
    if "LOCAL_KERNELS" not in os.environ:
        variant = Path(request.getfixturevalue("fused_rnn").__file__).parent
        monkeypatch.setenv("LOCAL_KERNELS", f"flashcell/fused-rnn={variant}")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """These models are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
