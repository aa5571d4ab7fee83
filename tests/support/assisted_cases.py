"""Greedy texts with and without assistance, and their comparison."""

import torch

from flashcell.state.rollback import owed_tokens
from model_cases import state_tensors
from numerics import EPS, assert_close

SAME = 64 * EPS[torch.float32]  # of states after 40 tokens, read one by one or several at a time


def greedy(model, ids, new=24, **options):
    options = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, **options}
    if "assistant_model" in options:  # else an unsure draft would stop after a token
        config = options["assistant_model"].generation_config
        config.assistant_confidence_threshold, config.num_assistant_tokens = 0.0, 5
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


def check_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    caches = got.past_key_values, want.past_key_values
    assert len({cache.get_seq_length() for cache in caches}) == 1
    assert owed_tokens(caches[0]) == 0
    for ours, theirs in zip(*map(state_tensors, caches), strict=True):
        assert_close("states", ours, theirs, SAME)
