"""Tests that assisted decoding gives greedy decoding's tokens, and leaves greedy decoding's cache.

The small random models agree with their drafts now and then, so that tokens are both accepted and
taken back in almost every text: test_tokens_are_accepted_and_taken_back counts them.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from decode_cases import SAME, check_same
from decode_cases import greedy_with_cache as greedy
from flashcell.state import assisted
from flashcell.state.rollback import owed_tokens
from model_cases import VOCABULARY, cpu_only, state_tensors
from numerics import assert_close

LENGTHS = (1, 2, 7, 40)  # of prompts; the last is longer than what is read again


def prompts(tokens):
    """Texts of each length; the last is also there with repetition."""
    for length in LENGTHS:
        yield tokens(1, length)
    yield tokens(1, 9).repeat(1, 4)


def noisy(model, scale=0.02):
    """Returns a copy of the model that often agrees with it."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return draft


@pytest.fixture
def calls(monkeypatch):
    """Counts the tokens that each crop takes back."""
    counts = []
    crop = DynamicCache.crop
    monkeypatch.setattr(DynamicCache, "crop", lambda cache, n: (counts.append(-n), crop(cache, n)))
    return counts


@pytest.mark.thin
@pytest.mark.parametrize("count", [4, 20])
def test_lookup_gives_the_greedy_tokens(case, make_model, tokens, count):
    model = make_model(case)
    for ids in prompts(tokens):
        check_same(greedy(model, ids, prompt_lookup_num_tokens=count), greedy(model, ids))


@pytest.mark.thin
@pytest.mark.parametrize("other", ["gru", "flash_mlstm", "itself", "noisy", "shallow", "llama"])
def test_a_draft_gives_the_greedy_tokens(case, make_model, tokens, other):
    model = make_model(case)
    if other == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
        draft = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    else:
        made = {"itself": lambda: model, "noisy": lambda: noisy(model)}
        made["shallow"] = lambda: make_model(case, num_hidden_layers=1)
        draft = made.get(other, lambda: make_model(other))()
    for ids in prompts(tokens):
        check_same(greedy(model, ids, assistant_model=draft), greedy(model, ids))


def test_a_recurrent_draft_serves_an_attention_model(case, make_model, tokens):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    model, draft = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval(), make_model(case)
    for ids in prompts(tokens):
        got = greedy(model, ids, assistant_model=draft)
        assert torch.equal(got.sequences, greedy(model, ids).sequences)


def test_tokens_are_accepted_and_taken_back(case, make_model, tokens, calls):
    # a draft takes token 0 of the prompt for padding, because transformers gives it no mask
    model, ids = make_model(case), tokens(1, 9).clamp_min(1)
    greedy(model, ids, new=40, assistant_model=noisy(model, 0.1))
    assert any(calls)
    del calls[:]
    greedy(model, ids, new=40, assistant_model=model)
    assert len(calls) <= 2 * 8  # the draft's and the model's, for each 6 of 40 tokens


@pytest.mark.thin
@pytest.mark.parametrize("reread", [0, 1000])
def test_when_the_text_is_read_again_changes_nothing(case, make_model, tokens, monkeypatch, reread):
    monkeypatch.setattr(assisted, "REREAD", reread)
    model = make_model(case)
    for ids in prompts(tokens):
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(model)}):
            check_same(greedy(model, ids, **options), greedy(model, ids))


def test_a_draft_reads_a_long_prompt_once(make_model, tokens):
    """Also if none of its tokens is ever accepted."""
    model, draft, ids = make_model("lstm"), make_model("gru"), tokens(1, 200)
    read, forward = [], draft.model.forward
    draft.model.forward = lambda **given: (
        read.append(given["input_ids"].shape[1]),
        forward(**given),
    )[1]
    greedy(model, ids, assistant_model=draft)
    assert sum(length > 2 * assisted.REREAD for length in read) == 1


def test_stop_tokens_and_lengths(case, make_model, tokens):
    model, ids = make_model(case), tokens(1, 7)
    text = greedy(model, ids).sequences[0, 7:].tolist()
    last = int(ids[0, -1])  # a prompt that ends with a stop token ends transformers 5.17
    for at in (0, 3, 11):
        for options in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": model}):
            stops = {"eos_token_id": sorted({text[at], VOCABULARY - 1} - {last})}
            check_same(greedy(model, ids, **stops, **options), greedy(model, ids, **stops))
    for new in (1, 2, 3, 10):
        for options in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": model}):
            check_same(greedy(model, ids, new, **options), greedy(model, ids, new))


def test_the_outputs_of_all_layers(case, make_model, tokens):
    """As transformers' own tests of assisted decoding ask for them.

    Of the hidden states only the shapes are compared: after the first call transformers gives those of
    the prompt's first tokens for those of the tokens that were tried."""
    model = make_model(case)
    told = {"output_hidden_states": True, "output_scores": True, "output_logits": True}
    for ids in (tokens(1, 1), tokens(1, 5), tokens(1, 40)):
        want = greedy(model, ids, **told)
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(model)}):
            got = greedy(model, ids, **told, **options)
            check_same(got, want)
            for name in ("scores", "logits"):
                pair = (torch.stack(getattr(found, name)) for found in (got, want))
                assert_close(name, *pair, SAME)
            lengths = [[layer.shape for layer in step] for step in want.hidden_states]
            assert [[layer.shape for layer in step] for step in got.hidden_states] == lengths


def test_the_text_goes_on_from_the_cache(case, make_model, tokens):
    """With and without assistance, from a cache that assistance has left, or the caller gives."""
    model, ids = make_model(case), tokens(1, 7)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(model)}):
        first = greedy(model, ids, new=10, **options)
        cache = first.past_key_values
        assert not cache.layers[0].record_past
        assert cache.layers[0].past == ()
        text = torch.cat([first.sequences, tokens(1, 5)], 1)
        want = greedy(model, text)
        copied = copy.deepcopy(cache)
        check_same(greedy(model, text, past_key_values=cache, **options), want)
        check_same(greedy(model, text, past_key_values=copied), want)
        given = DynamicCache(config=model.config)
        assert torch.equal(
            greedy(model, ids, past_key_values=given, return_dict_in_generate=False, **options),
            greedy(model, ids).sequences,
        )
        assert given.get_seq_length() == 30
        assert owed_tokens(given) == 0


def test_padding_and_documents_in_the_prompt(case, make_model, tokens):
    model, ids = make_model(case), tokens(1, 12)
    mask, positions = torch.ones_like(ids), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])
    mask[:, :3] = 0
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        want = greedy(model, ids, **given)
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(model)}):
            check_same(greedy(model, ids, **given, **options), want)


def test_sampling_with_certainty_is_greedy(case, make_model, tokens):
    """A sample from one token can only be that token; a real sample has the right length."""
    model, ids = make_model(case), tokens(1, 7)
    want = greedy(model, ids).sequences
    options = {"max_new_tokens": 24, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    for assistance in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(model)}):
        sure = model.generate(ids, do_sample=True, top_k=1, **options, **assistance)
        assert torch.equal(sure, want)
        free = model.generate(ids, do_sample=True, top_k=0, **options, **assistance)
        assert free.shape == want.shape


def test_crop_takes_back_what_was_read(case, make_model, tokens):
    model, ids = make_model(case), tokens(1, 20)
    cache, shorter = (DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        cache.activate_past_recording()
        model(ids[:, 8:], past_key_values=cache)
        cache.crop(-12)
        model(ids[:, :8], past_key_values=shorter)
        assert cache.get_seq_length() == 8
        assert owed_tokens(cache) == 0
        for ours, theirs in zip(*map(state_tensors, (cache, shorter)), strict=True):
            assert torch.equal(ours, theirs)
        model(ids[:, 8:], past_key_values=cache)
        cache.crop(torch.tensor(-5))  # as older transformers give it
        assert cache.get_seq_length() == 15
        assert type(cache.get_seq_length()) is int
        assert owed_tokens(cache) == 7
        for call in (model, model.base_model):
            with pytest.raises(ValueError, match=r"cropped to 15 tokens, .* the last 7 of them"):
                call(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="cropped to 15 tokens"):
            model.save_state(cache, "never.safetensors")
        cache.crop(-3)
        assert cache.get_seq_length() == 12
        assert owed_tokens(cache) == 4
        check_same(greedy(model, ids[:, :14], past_key_values=cache), greedy(model, ids[:, :14]))


def test_wrong_crops_are_refused(make_model, tokens):
    model, ids = make_model(), tokens(1, 6)
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"-2, but must be 0: .* activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    for wrong in (-7, 1):
        with pytest.raises(RuntimeError, match=rf"is {wrong}, but must be from -6 to 0"):
            cache.crop(wrong)
    static = StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(RuntimeError, match="StaticRecurrentStateLayer overwrites its states"):
        static.activate_past_recording()


@cpu_only
def test_what_cannot_be_done_is_refused_by_name(case, make_model, tokens):
    model, ids = make_model(case), tokens(1, 4)
    for name, value in {"assistant_early_exit": 1, "use_mtp": True}.items():
        with pytest.raises(ValueError, match=rf"{name} is {value}, but {type(model).__name__} can"):
            greedy(model, ids, **{name: value})
    with pytest.raises(ValueError, match="batch_size = 1"):
        greedy(model, ids.repeat(2, 1), prompt_lookup_num_tokens=2)
    with pytest.raises(RuntimeError, match="StaticRecurrentStateLayer overwrites its states"):
        greedy(model, ids, prompt_lookup_num_tokens=2, cache_implementation="static")
