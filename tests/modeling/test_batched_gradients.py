"""Tests gradients of a batch of output gradients: is_grads_batched, jacobian(vectorize=True), and
torch.vmap over torch.autograd.grad."""

from contextlib import nullcontext as ignored

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import flashcell
from cases import DEVICE
from flashcell import FlashMLSTMConfig, FlashRNNConfig
from numerics import assert_bitwise, assert_close

I, D, B, T = 3, 4, 2, 5
MODULES = {
    "LSTM": lambda **o: flashcell.LSTM(I, D, 2, bidirectional=True, **o),
    "GRU": lambda **o: flashcell.GRU(I, D, batch_first=True, **o),
    "RNN": lambda **o: flashcell.RNN(I, D, nonlinearity="relu", bias=False, **o),
    "LSTMCell": lambda **o: flashcell.LSTMCell(I, D, **o),
    "GRUCell": lambda **o: flashcell.GRUCell(I, D, **o),
    "RNNCell": lambda **o: flashcell.RNNCell(I, D, **o),
}
WAYS = {
    "is_grads_batched": lambda y, to, given: torch.autograd.grad(
        y, to, given, retain_graph=True, is_grads_batched=True
    ),
    "vmap": lambda y, to, given: torch.vmap(
        lambda dy: torch.autograd.grad(y, to, dy, retain_graph=True)
    )(given),
    "vmap of vmap": lambda y, to, given: [
        found[0]
        for found in torch.vmap(
            torch.vmap(lambda dy: torch.autograd.grad(y, to, dy, retain_graph=True))
        )(given[None])
    ],
}
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def output_of(result):
    """The output of a module."""
    return result[0] if isinstance(result, tuple) else result


def last_of(result):
    """The last state of a module that has been set apart from its output: c, or h."""
    last = result[1] if isinstance(result, tuple) else result
    return last[1] if isinstance(last, tuple) else last


def check_each(y, leaves, way):
    """Compares the gradients of three output gradients with those of one at a time."""
    given = torch.randn(3, *y.shape, dtype=y.dtype)
    found = WAYS[way](y, leaves, given)
    for index, dy in enumerate(given):
        one = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        for number, (batch, single) in enumerate(zip(found, one, strict=True)):
            assert_bitwise(f"gradient {number} of {index}", batch[index], single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_each_gradient_is_as_alone(name, way, dtype):
    module = MODULES[name](dtype=dtype, backend=DEVICE)
    x = torch.randn(*((B, I) if "Cell" in name else (T, B, I)), dtype=dtype, requires_grad=True)
    check_each(output_of(module(x)), (x, *module.parameters()), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_states_without_a_gradient_of_x(name, way):
    module = MODULES[name](backend=DEVICE)
    layers = (4 if name == "LSTM" else 1,) if "Cell" not in name else ()
    rows = T if name == "GRU" else B  # the GRU's batch comes first
    states = [torch.randn(*layers, rows, D, requires_grad=True) for _ in range(2)]
    hx = tuple(states) if "LSTM" in name else states[0]
    x = torch.randn(*((B, I) if "Cell" in name else (T, B, I)))
    leaves = (*(states if "LSTM" in name else states[:1]), *module.parameters())
    check_each(last_of(module(x, hx)), leaves, way)


def test_second_derivatives_and_checkpoints():
    module, x = flashcell.GRU(I, D, backend=DEVICE), torch.randn(T, B, I, requires_grad=True)
    given = torch.randn(3, T, B, D)
    with pytest.warns(RuntimeWarning, match="create_graph=True") if DEVICE == "cpu" else ignored():
        y = module(x)[0]
        (found,) = torch.autograd.grad(y, x, given, is_grads_batched=True, create_graph=True)
    for index, dy in enumerate(given):
        assert_close("with a graph", found[index], torch.autograd.grad(y, x, dy)[0], 1e-5)
        y = module(x)[0]
    y = checkpoint(lambda x: module(x)[0], x, use_reentrant=False)
    (found,) = torch.autograd.grad(y, x, given, is_grads_batched=True)
    for index, dy in enumerate(given):
        assert_close("checkpoint", found[index], torch.autograd.grad(module(x)[0], x, dy)[0], 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences(way):
    module = flashcell.LSTM(I, D, backend=DEVICE)
    leaves = [torch.randn(n, I, requires_grad=True) for n in (5, 3)]
    with torch.device("cpu"):  # where the lengths must be
        packed = pack_sequence(leaves)
    check_each(module(packed)[0].data, (*leaves, *module.parameters()), way)


@pytest.mark.parametrize("name", MODULES)
def test_vectorized_jacobian(name):
    module = MODULES[name](backend=DEVICE)
    x = torch.randn(*((B, I) if "Cell" in name else (T, B, I)))
    run = lambda x: output_of(module(x))
    assert_close("jacobian", jacobian(run, x, vectorize=True), jacobian(run, x), 1e-6)


@pytest.mark.parametrize("cell", ["lstm", "slstm", "flash_gru", "flash_lstm", "mlstm"])
def test_models(cell):
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    config = FlashMLSTMConfig(**sizes) if cell == "mlstm" else FlashRNNConfig(**sizes, cell=cell)
    model = AutoModelForCausalLM.from_config(config)
    y = model(torch.randint(3, 30, (2, 9))).logits[:, -1, :3].flatten()
    leaves = [p for p in model.parameters() if p.requires_grad]
    given = torch.eye(len(y))
    found = WAYS["is_grads_batched"](y, leaves, given)
    for index, dy in enumerate(given):
        one = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        for number, (batch, single) in enumerate(zip(found, one, strict=True)):
            assert_close(f"gradient {number} of {index}", batch[index], single, 1e-5)
