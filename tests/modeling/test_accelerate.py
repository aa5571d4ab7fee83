"""Tests accelerate(model): transformers' xLSTM with our mLSTM has the same outputs and trains the
same.

If the `xlstm` package is installed, transformers takes its blocks from there, and this tests
those.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import xLSTMConfig, xLSTMForCausalLM

import flashcell
from flashcell.integrations.slstm_cells import XlstmCell
from numerics import assert_close

# Kernels are named, because the package's own defaults need a GPU.
PLAIN = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}
SIZES = {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2}


@pytest.fixture
def theirs():
    model = xLSTMForCausalLM(xLSTMConfig(**SIZES, **PLAIN)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def ours(theirs):
    return flashcell.accelerate(copy.deepcopy(theirs))


def test_same_logits(theirs, ours, tokens):
    ids = tokens(2, 150)
    with torch.no_grad():
        want, got = theirs(ids, use_cache=True), ours(ids, use_cache=True)
        assert (got.logits - want.logits).abs().max() <= 1e-4
        for _ in range(3):
            ids = tokens(2, 1)
            want = theirs(ids, use_cache=True, cache_params=want.cache_params)
            got = ours(ids, use_cache=True, cache_params=got.cache_params)
            assert (got.logits - want.logits).abs().max() <= 1e-4


def test_same_text(theirs, ours, tokens):
    ids = tokens(2, 33)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    got = ours.generate(ids, **options)
    assert torch.equal(got, theirs.generate(ids, **options))
    assert len(got[:, 33:].unique()) > 5


def test_same_weights_and_gradients(theirs, ours, tokens):
    """transformers' gradient omits the divisor, whose effect the norm after it cancels."""
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ids = tokens(2, 128)
    grads = [
        torch.autograd.grad(m(ids, labels=ids, use_cache=False).loss, list(m.parameters()))
        for m in (ours, theirs)
    ]
    names = [name for name, _ in ours.named_parameters()]
    for name, got, want in zip(names, *grads, strict=True):
        assert_close(name, got, want, 1e-4)


TRAINING = {
    "as configured": ({}, torch.float32, "modified by an inplace operation"),
    "bf16": ({"use_cache": False}, torch.bfloat16, "dtype|scalar type"),
    "bf16 as configured": ({}, torch.bfloat16, "modified by an inplace operation"),
}


@pytest.mark.parametrize("how", TRAINING)
def test_trains_where_theirs_does_not(theirs, ours, tokens, how):
    options, dtype, message = TRAINING[how]
    ids = tokens(2, 128)

    def train(model) -> None:
        model.to(dtype).train()(ids, labels=ids, **options).loss.backward()

    with pytest.raises(RuntimeError, match=message):
        train(theirs)
    train(ours)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in ours.parameters())


def test_train_mode_takes_any_length(tokens):
    config = xLSTMConfig(**SIZES, **PLAIN, mode="train")
    theirs, ids = xLSTMForCausalLM(config).train(), tokens(2, 100)
    with pytest.raises((ValueError, AssertionError)):
        theirs(ids, labels=ids, use_cache=False)
    loss = flashcell.accelerate(theirs)(ids, labels=ids, use_cache=False).loss
    assert loss.isfinite()


def test_the_backend_can_be_changed(ours, tokens):
    ids = tokens(1, 9)
    with torch.no_grad():
        binary = ours(ids).logits
        same = flashcell.accelerate(ours, backend="reference")
        assert same is ours
        assert {m.backend for m in ours.modules() if type(m).__name__ == "TflaBackend"} == {
            "reference"
        }
        assert (ours(ids).logits - binary).abs().max() <= 1e-4


def test_refusals(theirs):
    with pytest.raises(ValueError, match="backend is 'gpu', but must be one of"):
        flashcell.accelerate(theirs, backend="gpu")
    with pytest.raises(
        ValueError, match="model is a Linear without a recurrent module that is known"
    ):
        flashcell.accelerate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is a str, but must be a torch\.nn\.Module"):
        flashcell.accelerate("NX-AI/xLSTM-7b")


def test_another_call_changes_the_backend():
    model = nn.Sequential(nn.LSTM(4, 8), nn.GRUCell(8, 8))
    flashcell.accelerate(model, backend="reference")
    assert [m.kernel_backend for m in model] == ["reference"] * 2
    flashcell.accelerate(model)
    assert [m.kernel_backend for m in model] == ["auto"] * 2


@pytest.mark.parametrize("option", [{}, {"cut": True}, {"clipval": 1e-3}], ids=str)
def test_slstm_cells_of_xlstm(option):
    """Its "vanilla" backend ignores what it says of gradients; its CUDA code also clips h."""
    cells = pytest.importorskip("xlstm.blocks.slstm.cell")
    options = {f"gradient_recurrent_{name}": value for name, value in option.items()}
    options |= {"hidden_size": 16, "num_heads": 2, "recurrent_weight_init": "standard"}
    theirs = cells.sLSTMCell(cells.sLSTMCellConfig(backend="vanilla", **options))
    ours, x = flashcell.accelerate(copy.deepcopy(theirs)), torch.randn(2, 7, 64)
    assert type(ours) is not type(theirs)
    sides = []
    for cell in (theirs, ours):
        h, _ = cell(x)
        sides.append((h, *torch.autograd.grad(h.square().sum(), list(cell.parameters()))))
    for want, got in zip(*sides, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)  # observed 2.4e-7
    theirs.config.backend = "cuda"
    refused = (XlstmCell.refusal(theirs) or "").startswith("its CUDA code clips h")
    assert refused == ("clipval" in option)
