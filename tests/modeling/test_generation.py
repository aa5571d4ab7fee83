"""Tests that generate() with the cache equals generate() without, however states are stored."""

import copy
import re

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from flashcell.generation.decode_path import may_run_ahead
from model_cases import CASES, blocks, state_tensors
from numerics import EPS, assert_close

SAME = 16 * EPS[torch.float32]  # see test_boundaries.py


def greedy(model, ids, new=24, **kwargs):
    if ids is not None:  # without a mask, generate takes every token 0 of a prompt for padding
        kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **kwargs)


def test_cached_generation_is_uncached_generation(case, make_model, tokens):
    model, ids = make_model(case), tokens(3, 7)
    cached, uncached = greedy(model, ids), greedy(model, ids, use_cache=False)
    assert torch.equal(cached, uncached)
    assert len(cached[:, 7:].unique()) > 5, "a text of one token proves nothing"


def test_every_prefix_may_be_cached(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 11)
    with torch.no_grad():
        whole = model(ids).logits
        for chunk in (1, 2, 4, 10):
            cache, parts = DynamicCache(config=model.config), []
            for part in ids.split(chunk, dim=1):
                parts.append(model(part, past_key_values=cache).logits)
            assert_close(f"chunks of {chunk}", torch.cat(parts, 1), whole, SAME)
            assert cache.get_seq_length() == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits(case, make_model, tokens, dtype):
    """With a cache they are as far from fp32 as without one, and both as near as 16 bits allow.

    In bf16 each of about ten roundings a block to 8 bits moves the residual stream by 2^-9 of its size at
    most, at random: sqrt(20) * 2^-9 is 0.9 %. The bound is three times that.
    """
    model, ids = make_model(case), tokens(4, 24)
    with torch.no_grad():
        exact = model(ids).logits
        model = model.to(dtype)
        whole, cache, parts = model(ids).logits, DynamicCache(config=model.config), []
        for part in ids.split(1, dim=1):
            parts.append(model(part, past_key_values=cache).logits)
    assert whole.dtype == (CASES[case].logits or dtype)
    assert all(s.dtype == torch.float32 for layer in cache.layers for s in layer.get_states())
    bound = 3 * 20**0.5 * EPS[dtype] / 2
    assert_close("whole", whole, exact, bound)
    assert_close("cached", torch.cat(parts, 1), exact, bound)


def test_left_padded_batch_is_each_prompt_alone(case, make_model, tokens):
    model, lengths = make_model(case), (2, 5, 9)
    prompts = [tokens(1, n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(p, (9 - p.shape[1], 0)) for p in prompts])
    mask = torch.tensor([[0] * (9 - n) + [1] * n for n in lengths])
    alone = torch.cat([greedy(model, p)[:, p.shape[1] :] for p in prompts])
    for kwargs in ({}, {"use_cache": False}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 4}):
        assert torch.equal(greedy(model, ids, attention_mask=mask, **kwargs)[:, 9:], alone), kwargs


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_a_prompt_without_padding_runs_without_a_mask(make_model, tokens, monkeypatch, options):
    model, ids = make_model("flash_mlstm"), tokens(2, 9)
    given, kind = [], type(model.backbone)
    forward = kind.forward

    def run(self, *args, **kwargs):
        given.append((kwargs.get("attention_mask"), kwargs.get("position_ids")))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", run)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for mask, has_mask in ((torch.ones_like(ids), False), (padded, True)):
        given.clear()
        greedy(model, ids, new=3, attention_mask=mask, **options)
        assert [value is not None for value in given[0]] == [has_mask, has_mask]


def test_beam_search(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 5)
    beams = {"num_beams": 3, "num_return_sequences": 2, "new": 10}
    uncached = greedy(model, ids, use_cache=False, **beams)
    assert torch.equal(greedy(model, ids, **beams), uncached)
    assert torch.equal(greedy(model, ids, cache_implementation="static", **beams), uncached)


def test_chunked_prefill(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 13)
    for size in (1, 4, 13, 20):
        assert torch.equal(greedy(model, ids, prefill_chunk_size=size), greedy(model, ids)), size


def test_long_prompts_are_read_in_pieces(case, make_model, tokens, monkeypatch):
    model, ids, lengths = make_model(case), tokens(2, 600), []
    mask = torch.ones_like(ids)
    mask[0, :300] = mask[1, 500:510] = 0
    block = type(blocks(model)[0])
    run = block.run

    def counted(self, hidden_states, *arguments):
        lengths.append(hidden_states.shape[1])
        return run(self, hidden_states, *arguments)

    monkeypatch.setattr(block, "run", counted)
    want = greedy(model, ids, attention_mask=mask)
    assert max(lengths) == 600
    del lengths[:]
    model.prompt_tokens = 513
    assert torch.equal(greedy(model, ids, attention_mask=mask), want)
    assert max(lengths) == 256
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(
        greedy(model, None, inputs_embeds=embeds, attention_mask=mask), want[:, 600:]
    )


def test_only_code_of_transformers_is_called_after_the_end():
    class Own(LogitsProcessor):
        pass

    end, prefix = EosTokenCriteria(1), PrefixConstrainedLogitsProcessor(lambda *_: [], 1)
    assert may_run_ahead([TemperatureLogitsWarper(2.0)], [MaxLengthCriteria(9), end])
    for processors, criteria in (([Own()], []), ([prefix], []), ([], [end, lambda *_: False])):
        assert not may_run_ahead(processors, criteria)


def test_conversation_continues_from_the_returned_cache(case, make_model, tokens):
    model, first, second = make_model(case), tokens(2, 5), tokens(2, 4)
    turn = greedy(model, first, new=6, return_dict_in_generate=True)
    text = torch.cat([turn.sequences, second], 1)
    want = greedy(model, text, new=6)
    unread = text[:, turn.past_key_values.get_seq_length() :]
    for ids in (text, unread):
        cache = copy.deepcopy(turn.past_key_values)  # one prompt's cache may serve many times
        mask = torch.ones_like(text)
        got = greedy(model, ids, new=6, past_key_values=cache, attention_mask=mask)
        assert torch.equal(got[:, -6:], want[:, -6:]), f"{ids.shape[1]} tokens passed"
        assert cache.get_seq_length() == text.shape[1] + 6 - 1
    with pytest.raises(ValueError, match="the cache already holds 10 tokens"):
        greedy(model, second, past_key_values=turn.past_key_values)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_a_mask_that_does_not_fit_is_named(case, make_model, tokens, options):
    model, ids, wanted = make_model(case), tokens(2, 5), r"but must be \[2, 5\]"
    for shape in ((2, 3), (2, 7), (3, 5), (1, 5), (5,), (2, 1, 5, 5)):
        for mask in (torch.ones(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)):
            had = re.escape(f"attention_mask has shape {list(shape)}")
            with pytest.raises(
                ValueError, match=f"{had}, {wanted}: a column for each token of inp"
            ):
                greedy(model, ids, attention_mask=mask, **options)
    with pytest.raises(TypeError, match="attention_mask is a list, but must be a tensor"):
        greedy(model, ids, attention_mask=[[1] * 5] * 2, **options)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=f"{wanted}: a column for each token of inputs_embeds"):
        greedy(model, None, inputs_embeds=embeds, attention_mask=torch.ones(2, 4), **options)


def test_a_mask_beside_a_cache_is_of_the_whole_text(make_model, tokens):
    """If the mask missed a token, the text's last token would silently be ignored."""
    model, first, second = make_model(), tokens(2, 5), tokens(2, 4)
    turn = greedy(model, first, new=6, return_dict_in_generate=True)
    # The cache has 10 tokens.
    mask, cache = torch.ones(2, 15, dtype=torch.long), turn.past_key_values
    with pytest.raises(
        ValueError, match=r"but must be \[2, 4\] or \[2, 14\]: .* the cache's 10 tok"
    ):
        greedy(model, second, past_key_values=cache, attention_mask=mask)


def test_an_empty_prompt_is_refused(case, make_model, tokens):
    """Its first token would follow nothing; transformers' own models raise an IndexError."""
    model, prompt = make_model(case), tokens(2, 5)
    for options in ({}, {"use_cache": False}, {"bos_token_id": 1}, {"attention_mask": None}):
        for ids in (prompt[:, :0], prompt[:0], prompt[0], prompt[:, :0].float()):
            shape = re.escape(str(list(ids.shape)))
            with pytest.raises(
                ValueError, match=f"input_ids has shape {shape}, but must be .B, T."
            ):
                greedy(model, ids, **options)
    with pytest.raises(ValueError, match=r"shape \[2, 0, 32\], but must be \[B, T, H\] with at"):
        greedy(model, None, inputs_embeds=torch.empty(2, 0, 32))
    with pytest.raises(TypeError, match="input_ids is a list, but must be a tensor"):
        model.generate(prompt.tolist())
    assert greedy(model, None, new=3, bos_token_id=1).shape == (1, 4)


def test_logits_to_keep(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    whole = model(ids).logits
    assert_close("last two", model(ids, logits_to_keep=2).logits, whole[:, -2:], SAME)
    chosen = torch.tensor([0, 4])
    assert_close("chosen", model(ids, logits_to_keep=chosen).logits, whole[:, chosen], SAME)


def test_contrastive_search_is_refused(case, make_model, tokens):
    with pytest.raises(
        ValueError, match=r"contrastive search is asked for, but .* after one state"
    ):
        greedy(make_model(case), tokens(1, 4), penalty_alpha=0.6, top_k=4)


def test_a_token_costs_the_same_after_ten_thousand(make_model, tokens):
    """The same operators run on the same sizes after 10 and after 10,000 tokens, so the work is the
    same.

    scripts/bench_models --decode-growth prints what `generate` costs from token to token.
    """
    model = make_model(num_hidden_layers=1)
    steps = ("_fused_rnn", "cudaGraphLaunch")  # the kernel's op, or the graph that contains it
    caches = {n: DynamicCache(config=model.config) for n in (10, 10_000)}
    work = {}
    with torch.no_grad():
        for n, cache in caches.items():
            model(tokens(1, n), past_key_values=cache)
            for _ in range(3):  # the first steps of a model and of a cache prepare some things
                model(tokens(1, 1), past_key_values=cache)
            with torch.profiler.profile(record_shapes=True) as profile:
                for _ in range(20):
                    model(tokens(1, 1), past_key_values=cache)
            events = [(event.name, event.input_shapes) for event in profile.events()]
            work[n] = [e for e in events if e[0].startswith(("aten::", *steps))]
    assert any(name.startswith(steps) for name, _ in work[10])
    assert work[10_000] == work[10]
    states = state_tensors(caches[10_000])
    storages = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in states}
    assert sum(storages.values()) == 2 * 32 * 4
    assert caches[10_000].get_seq_length() == 10_023


def test_static_cache_is_the_dynamic_one(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=8)
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            model(ids[:, 4:], past_key_values=cache)
        assert cache.get_seq_length() == 6
    for want, got in zip(*map(state_tensors, caches), strict=True):
        assert torch.equal(got, want)


def test_a_cache_goes_by_either_name(make_model, tokens):
    """transformers renames past_key_values to cache in 5.24."""
    model, ids = make_model(), tokens(2, 4)
    for call in (model, model.model):
        first, second = (call(ids, use_cache=True).past_key_values for _ in range(2))
        got, want = call(ids, cache=first), call(ids, past_key_values=second)
        assert torch.equal(got[0], want[0])
        with pytest.raises(ValueError, match="past_key_values and cache are both given"):
            call(ids, past_key_values=first, cache=second)
