"""Tests that several projections of one input share its copy under autocast."""

import pytest
import torch
from torch import nn

from cases import DEVICE
from flashcell.layers.feed_forward import SwiGLU, cast_once
from flashcell.modeling_flash_mlstm import FlashMLSTMConfig, FlashMLSTMFeedForward


def make_mlps() -> dict[str, nn.Module]:
    config = FlashMLSTMConfig(hidden_size=16, num_heads=1, vocab_size=16)
    return {"flash_rnn": SwiGLU(16, 32), "flash_mlstm": FlashMLSTMFeedForward(config)}


@pytest.mark.parametrize("family", make_mlps())
def test_one_copy_and_the_same_values(family, monkeypatch):
    torch.manual_seed(0)
    leaf = torch.randn(2, 5, 16, requires_grad=True)
    mlp, x = make_mlps()[family], leaf * 1  # not a leaf: autocast caches copies of leaves

    def run() -> tuple[torch.Tensor, int]:
        # Copies of x, by address; kept alive so that no address is reused.
        kept: dict[int, torch.Tensor] = {}

        def keep(t: torch.Tensor) -> torch.Tensor:
            kept[t.data_ptr()] = t
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with hooks, torch.autocast(DEVICE, torch.bfloat16):
            y = mlp(x)
        copies = (t for t in kept.values() if t.dtype == torch.bfloat16 and t.shape[-1] == 16)
        return y, sum(t.numel() == x.numel() for t in copies)

    y, copies = run()
    module = type(mlp).__module__
    monkeypatch.setattr(f"{module}.cast_once", lambda x: x)
    each, several = run()
    assert torch.equal(y, each)
    assert (copies, several) == (1, 2)


def test_what_autocast_leaves_alone_is_left_alone():
    x = torch.randn(3)
    assert cast_once(x) is x
    with torch.autocast(DEVICE, torch.bfloat16):
        assert cast_once(x).dtype == torch.bfloat16
        assert cast_once(x.double()).dtype == torch.float64
        with torch.autocast(DEVICE, enabled=False):
            assert cast_once(x) is x


def test_meta_tensors_pass_through_every_family(case, make_model):
    """Memory planners ask for shapes and dtypes of a model on the meta device, under autocast."""
    model = make_model(case).to("meta")
    ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = model(ids).logits
    assert (logits.device.type, logits.shape) == ("meta", (2, 3, model.config.vocab_size))
