"""Tests models whose layers somebody has replaced by others: one token reads all that a text reads."""

import pytest
import torch
from torch import nn

from model_cases import VOCABULARY
from numerics import assert_close

LINEARS = ("Linear", "GateLinear")


def both_ways(model, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last token's logits, read with the text and alone after it."""
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        return model(ids[:, -1:], past_key_values=cache).logits, model(ids).logits[:, -1:]


def check(model, ids) -> torch.Tensor:
    """Returns the last token's logits, which are the same both ways."""
    step, whole = both_ways(model, ids)
    assert_close("logits", step, whole, 2e-5)
    return whole


def places(model, kinds) -> list[str]:
    return [name for name, m in model.named_modules() if type(m).__name__ in kinds]


def with_bias(module: nn.Linear) -> nn.Linear:
    new = nn.Linear(module.in_features, module.out_features)
    new.weight = module.weight
    nn.init.normal_(new.bias)
    return new


def test_a_linear_layer_with_a_bias(case, make_model, tokens):
    model, ids = make_model(case).eval(), tokens(2, 6)
    for name in places(model, LINEARS):
        _, before = both_ways(model, ids)
        old = model.get_submodule(name)
        model.set_submodule(name, with_bias(old))
        assert not torch.allclose(check(model, ids), before, rtol=1e-3)
        model.set_submodule(name, old)


def test_a_linear_layer_without_a_bias(case, make_model, tokens):
    model, ids = make_model(case).eval(), tokens(2, 6)
    for name in places(model, LINEARS):
        old = model.get_submodule(name)
        new = nn.Linear(old.in_features, old.out_features, bias=False)
        model.set_submodule(name, new)
        check(model, ids)
        model.set_submodule(name, old)
        if old.bias is not None:
            bias, old.bias = old.bias, None
            check(model, ids)
            old.bias = bias


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False, "eps": 1e-6}], ids=str)
def test_a_norm_of_torch_s_defaults(case, make_model, tokens, options):
    model, ids = make_model(case).eval(), tokens(2, 6)
    for name in places(model, ("RMSNorm",)):
        old = model.get_submodule(name)
        model.set_submodule(name, nn.RMSNorm(old.normalized_shape, **options))
        check(model, ids)
        model.set_submodule(name, old)


def test_a_head_with_a_bias_learns_and_generates(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 8)
    model.lm_head = nn.Linear(model.config.hidden_size, VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    text, model = ids[:, :4], model.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (model.generate(text, use_cache=u, **options) for u in (True, False))
    assert with_cache.tolist() == without.tolist()


def test_the_decoder_is_the_base_model(make_model, tokens):
    model, other, ids = make_model().eval(), make_model().eval(), tokens(2, 6)
    assert model.get_decoder() is model.base_model
    model.set_decoder(other.get_decoder())
    model.lm_head = other.lm_head
    assert (
        model.generate(ids, max_new_tokens=3).tolist()
        == other.generate(ids, max_new_tokens=3).tolist()
    )


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_lists_are_refused(case, make_model, name):
    model = make_model(case)
    for part in (model, model.base_model):
        with pytest.raises(TypeError, match=f"{name} is a list, but must be a tensor"):
            part(**{name: [[1, 2]]})
