"""Tests the training loss without logits against cross_entropy on logits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import flashcell  # noqa: F401  registers the families
from training import loss as training_loss
from training.corpus import held_out_lanes
from training.loss import HeadLoss, add_loss
from training.step import held_out_loss

TOKENS, WIDTH, VOCABULARY = 23, 8, 50


def draw() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[[3, 11, 22]] = -100
    return x, weight, targets


def plain_loss(x, weight, targets, cap, z_loss):
    logits = x @ weight.mT
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    squares = logits.logsumexp(-1).square()[targets != -100]
    return cross_entropy(logits, targets) + z_loss * squares.mean()


@pytest.mark.parametrize("chunk", [2**28, 7 * VOCABULARY, 1])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_loss_and_gradients(monkeypatch, cap, z_loss, chunk):
    monkeypatch.setattr(training_loss, "CHUNK", chunk)
    x, weight, targets = draw()
    got = HeadLoss.apply(x, weight, targets, cap, z_loss)
    want = plain_loss(x, weight, targets, cap, z_loss)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    grads = torch.autograd.grad(2 * got, [x, weight]), torch.autograd.grad(2 * want, [x, weight])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_no_target_is_no_loss():
    """One process of several can get rows that are only prompts: its share of the mean is 0."""
    x, weight, targets = draw()
    loss = HeadLoss.apply(x, weight, torch.full_like(targets, -100), None, 0.1)
    grads = torch.autograd.grad(loss, [x, weight])
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_bf16_is_as_exact_as_cross_entropy_on_bf16_logits(cap):
    """Both round the logits and their gradients: neither may be much further from float64."""
    x, weight, targets = draw()
    exact = torch.autograd.grad(plain_loss(x, weight, targets, cap, 0.1), [x, weight])
    half = [t.detach().float().requires_grad_() for t in (x, weight)]
    errors = []
    for loss in (HeadLoss.apply, lambda *rest: plain_loss_in_fp32(*rest)):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(*half, targets, cap, 0.1)
        grads = torch.autograd.grad(value, half)
        assert [g.dtype for g in grads] == [torch.float32] * 2
        errors.append(
            [((a - b).norm() / b.norm()).item() for a, b in zip(grads, exact, strict=True)]
        )
    for ours, theirs in zip(*errors, strict=True):
        assert ours < 1.3 * theirs


def test_chunks_add_up_in_fp32(monkeypatch):
    """With weights in bf16, as FSDP2 gives them, many chunks round their gradient no more than one."""
    x, weight, targets = (t.detach() for t in draw())
    exact, errors = None, []
    for dtype, chunk in ((torch.float64, 2**28), (torch.bfloat16, 2**28), (torch.bfloat16, 1)):
        monkeypatch.setattr(training_loss, "CHUNK", chunk)
        w = weight.bfloat16().to(dtype).requires_grad_()
        loss = HeadLoss.apply(x.bfloat16().to(dtype), w, targets, None, 0.1)
        (grad,) = torch.autograd.grad(loss, w)
        assert grad.dtype == dtype
        exact = grad if exact is None else exact
        errors.append((grad.double() - exact).norm().item())
    assert errors[2] < 1.2 * errors[1]


def plain_loss_in_fp32(x, weight, targets, cap, z_loss):
    logits = (x @ weight.mT).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return (
        cross_entropy(logits, targets)
        + z_loss * logits.logsumexp(-1)[targets != -100].square().mean()
    )


def test_the_held_out_loss_counts_targets_alone():
    """The mean over all documents of a sum by hand, where some places have no target."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("flash_rnn", **SMALL, **MODELS["flash_rnn"])
    model = AutoModelForCausalLM.from_config(config)
    documents = [np.array([0, *range(1, 1 + n)]) for n in (7, 5, 5)]
    lanes = held_out_lanes(documents, 0)
    assert (lanes.targets == -100).any()
    total = 0.0
    for ids in documents:
        text = torch.tensor([[*ids, 0]])
        with torch.no_grad():
            logits = model(text[:, :-1]).logits[0]
        total += cross_entropy(logits, text[0, 1:], reduction="sum").item()
    want = total / sum(map(len, documents))
    for length in (3, 64):
        assert held_out_loss(model, lanes, length) == pytest.approx(want, rel=1e-5)


SMALL = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
MODELS = {
    "flash_rnn": {"num_heads": 2, "intermediate_size": 16, "backend": "reference"},
    "flash_mlstm": {"num_heads": 2, "qk_dim_factor": 1.0, "backend": "reference"},
    "llama": {"num_attention_heads": 2, "intermediate_size": 16},
    # Its head has a bias, logits are scaled, and there is no cache of that name.
    "phi": {"num_attention_heads": 2, "intermediate_size": 16},
    "granite": {"num_attention_heads": 2, "intermediate_size": 16, "logits_scaling": 3.0},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 4},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_to_return_its_loss(kind):
    """A model with add_loss returns its loss for targets, soft-capped logits included; without targets
    its logits do not change."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **MODELS[kind]))
    with torch.no_grad():
        model.lm_head.weight.mul_(300)  # far enough for the cap of 30 to matter
        if model.lm_head.bias is not None:
            model.lm_head.bias.normal_()
    tokens, names = torch.arange(8)[None], set(model.state_dict())
    logits = model(tokens).logits
    want = cross_entropy(logits[0], tokens[0]) + 0.5 * logits.logsumexp(-1).square().mean()
    add_loss(model)
    loss, cache = model(tokens, targets=tokens, z_loss=0.5, use_cache=True)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=0)
    assert (cache is None) == (kind == "mamba2")
    assert set(model.state_dict()) == names
