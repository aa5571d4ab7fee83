"""Tests the cache layer by itself, and truncated backpropagation through it."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from model_cases import CASES
from numerics import EPS, assert_close


def random_states() -> dict:
    return {
        "cell": (torch.randn(3, 2, 16), torch.randn(3, 2, 16)),
        "conv": (torch.randn(3, 4, 3, dtype=torch.bfloat16),),
    }


def tensors(layer) -> list[torch.Tensor]:
    return [s for group in layer.states.values() for s in group]


def filled(config, kind: str):
    """A cache whose layers hold a cell's two states and a window of a batch of 3 after 5 tokens."""
    static = kind == "static"
    cache = StaticCache(config, max_cache_len=16) if static else DynamicCache(config=config)
    for layer in cache.layers:
        layer.update_states(5, **random_states())
    return cache


KINDS = ["dynamic", "static"]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_changes(make_config, kind):
    changes = {
        "reorder_cache": (torch.tensor([2, 2, 0]), lambda s: s[[2, 2, 0]]),
        "batch_repeat_interleave": (2, lambda s: s.repeat_interleave(2, 0)),
        "batch_select_indices": (torch.tensor([1]), lambda s: s[[1]]),
    }
    for name, (argument, want) in changes.items():
        cache = filled(make_config(), kind)
        before = [[s.clone() for s in tensors(layer)] for layer in cache.layers]
        getattr(cache, name)(argument)
        for layer, old in zip(cache.layers, before, strict=True):
            for got, s in zip(tensors(layer), old, strict=True):
                assert torch.equal(got, want(s)), name
        assert cache.batch_size == len(want(torch.empty(3)))


@pytest.mark.parametrize("kind", KINDS)
def test_counts_and_forgets(make_config, kind):
    cache = filled(make_config(), kind)
    assert cache.get_seq_length() == 5
    assert cache.get_max_length() == -1
    assert cache.is_compileable
    cache.crop(0)
    with pytest.raises(RuntimeError, match="tokens_to_remove is -1, but must be 0"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert all(not s.any() for layer in cache.layers for s in tensors(layer))
    with pytest.raises(NotImplementedError, match="no keys and values"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


def test_static_buffers_never_move(make_config):
    cache = filled(make_config(), "static")
    layer = cache.layers[0]
    addresses = lambda: [t.data_ptr() for t in (*tensors(layer), layer.counter)]
    before = addresses()
    layer.update_states(1, **random_states())
    layer.reorder_cache(torch.tensor([1, 0, 2]))
    layer.reset()
    assert addresses() == before


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_backpropagation(case, make_model, tokens, kind):
    """With one cache for all chunks, each chunk's gradients treat its initial state as a constant."""
    model, ids = make_model(case).double().train(), tokens(2, 9)
    static = kind == "static"
    cache = StaticCache(model.config, 9) if static else DynamicCache(config=model.config)
    parameters, losses = list(model.parameters()), []
    for part in ids.split(3, dim=1):
        losses.append(model(part, past_key_values=cache, labels=part).loss)
    # All gradients at once, after the last update of the cache.
    together = torch.autograd.grad(sum(losses), parameters)

    apart = [torch.zeros_like(p) for p in parameters]
    for i, part in enumerate(ids.split(3, dim=1)):
        with torch.no_grad():
            before = model(ids[:, : 3 * i], use_cache=True).past_key_values if i else None
        loss = model(part, past_key_values=before, labels=part).loss
        for total, g in zip(apart, torch.autograd.grad(loss, parameters), strict=True):
            total.add_(g)
    for (name, _), got, want in zip(model.named_parameters(), together, apart, strict=True):
        # in units; observed: at most 37 (AVX2) and 16 (AVX-512)
        assert_close(name, got, want, 64 * EPS[torch.float64] * CASES[case].cancelled)


@pytest.mark.parametrize("length", [1, 4])
def test_a_cache_that_does_not_fit_is_named(case, make_config, make_model, tokens, length):
    model, ids = make_model(case), tokens(3, length)
    fewer = DynamicCache(config=make_config(case, num_hidden_layers=1))
    with torch.no_grad():
        two_rows = model(tokens(2, 3), use_cache=True).past_key_values
        for cache, message in (
            (DynamicCache(), "past_key_values is a DynamicCache with 0 layers .* must have 2"),
            (fewer, "past_key_values is a DynamicCache with 1 layers .* must have 2"),
            (two_rows, "past_key_values holds the states of 2 rows, but must hold 3"),
        ):
            with pytest.raises(ValueError, match=message):
                model(ids, past_key_values=cache)
