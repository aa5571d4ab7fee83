"""Tests that every way to run a model gives the same results, and is the way that was asked for."""

import pytest
import torch

from model_cases import CASES, VOCABULARY, cpu_only
from numerics import EPS, assert_close

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
POSITIONS = torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 3]])


def choose(model, path: dict) -> None:
    for name, value in path.items():
        setattr(model.config, name, value)


def results(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = model(ids, attention_mask=MASK, position_ids=POSITIONS, labels=ids)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": outputs.loss, "logits": outputs.logits[MASK.bool()], **gradients}


def test_every_way_is_the_same_model(case, make_model, tokens):
    """All ways to compute a model agree in float64, with padding and documents, and generate the
    same text; only the order of sums differs."""
    model, ids = make_model(case).double(), tokens(2, 9)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": MASK[:1],
    }
    want, text = results(model, ids), model.generate(ids[:1], **options)
    default = model.config.to_dict()
    for path in CASES[case].paths:
        before = {name: getattr(model.config, name) for name in path}
        choose(model, path)
        for name, got in results(model, ids).items():
            assert_close(
                f"{path} {name}", got, want[name], 64 * EPS[torch.float64] * CASES[case].cancelled
            )
        assert torch.equal(model.generate(ids[:1], **options), text), path
        choose(model, before)
    assert model.config.to_dict() == default


@cpu_only
@pytest.mark.parametrize("cell", ["flash_gru", "flash_lstm"])
def test_shapes_alone(make_model, tokens, cell):
    """A model on the meta device, which does not support autocast, returns meta logits."""
    model, ids = make_model(cell).to("meta"), tokens(2, 5).to("meta")
    logits = model(ids).logits
    assert logits.is_meta
    assert logits.shape == (2, 5, VOCABULARY)


@cpu_only
@pytest.mark.parametrize("cell", ["flash_gru", "flash_lstm"])
@pytest.mark.parametrize("method", ["newton", "multiple_shooting"])
def test_method_reaches_the_kernel(make_model, tokens, cell, method):
    model = make_model(cell, method=method, backend="cpu")
    with pytest.raises(
        ValueError, match=f"method is '{method}', but on the CPU it must be 'sequential'"
    ):
        model(tokens(1, 4))
    model.config.backend, model.config.max_iters, model.config.tol = "reference", 3, 0.5
    model(tokens(1, 4))
    model.config.tol = -1.0  # the configuration does not check changes after it is made
    with pytest.raises(ValueError, match=r"tol is -1\.0"):
        model(tokens(1, 4))


def test_recomputing_keeps_less(make_model, tokens):
    def kept(save: str) -> int:
        model, sizes = make_model("lstm", save=save), {}
        keep = lambda t: sizes.setdefault(t.data_ptr(), t.nbytes) and t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(ids)
        return sum(sizes.values())

    ids = tokens(2, 50)
    hidden = 2 * 50 * 32 * 4  # bytes of [B, T, H]; each of two layers keeps its gates or not
    assert kept("gates") - kept("recompute") > 2 * 1.5 * hidden
