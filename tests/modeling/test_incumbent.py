"""What transformers' own xLSTM gets wrong, said once and asked of both.

Every behaviour is a function that raises where it does not hold. When a release of transformers
mends one, its line in BROKEN fails, and goes.
"""

import pytest
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

from numerics import EPS, assert_close

SAME = 16 * EPS[torch.float32]  # see test_boundaries.py
PROMPT = torch.arange(2, 14).view(2, 6)


def left_padding(model):
    padded = torch.nn.functional.pad(PROMPT, (3, 0))
    mask = (torch.arange(9) >= 3).long().expand(2, -1)
    with torch.no_grad():
        batch = model(padded, attention_mask=mask).logits[:, 3:]
        assert_close("logits", batch, model(PROMPT).logits, SAME)


def beam_search(model):
    options = {"num_beams": 2, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(PROMPT)
    uncached = model.generate(PROMPT, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(PROMPT, attention_mask=mask, **options), uncached)


def continuation(model):
    """A conversation goes on from the cache that generate returned."""
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    turn = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), return_dict_in_generate=True, **options
    )
    text = torch.cat([turn.sequences, PROMPT], 1)
    mask = torch.ones_like(text)
    name = "past_key_values" if "past_key_values" in turn else "cache_params"
    got = model.generate(text, attention_mask=mask, **{name: turn[name]}, **options)
    assert torch.equal(got, model.generate(text, attention_mask=mask, **options))


def train(model):
    ids = torch.randint(2, 60, (1, 64))  # a whole chunk of the incumbent's
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def training_by_default(model):
    train(model)


def training_in_bf16(model):
    model.config.use_cache = False
    train(model.to(torch.bfloat16))


def fp32_states_in_bf16(model):
    outputs = model.to(torch.bfloat16)(PROMPT, use_cache=True)
    if "past_key_values" in outputs:
        states = [s for layer in outputs.past_key_values.layers for s in layer.get_states("cell")]
    else:
        states = [s for layer in outputs.cache_params.rnn_state.values() for s in layer]
    kept = {s.dtype for s in states}
    assert kept == {torch.float32}, f"states are {kept}"


def tied_embeddings(model):
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embeddings.weight, "the head has another matrix"


def logits_to_keep(model):
    kept = model(PROMPT, logits_to_keep=1).logits.shape[1]
    assert kept == 1, f"{kept} positions"


def packed_documents(model):
    packed = PROMPT.view(1, -1)
    positions = torch.arange(6).repeat(2)[None]
    with torch.no_grad():
        together = model(packed, position_ids=positions).logits
        assert_close("logits", together, model(PROMPT).logits.view_as(together), SAME)


BROKEN = {  # behaviour -> the incumbent's failure
    left_padding: (AssertionError, "logits: relative rms error"),
    beam_search: (ValueError, "the cache cannot be reordered"),
    continuation: (AttributeError, "is_compileable"),
    training_by_default: (RuntimeError, "modified by an inplace operation"),
    training_in_bf16: (RuntimeError, "same dtype|scalar type"),
    fp32_states_in_bf16: (AssertionError, "bfloat16"),
    tied_embeddings: (AssertionError, "another matrix"),
    logits_to_keep: (AssertionError, "6 positions"),
    packed_documents: (AssertionError, "logits: relative rms error"),
}


@pytest.mark.parametrize("behaviour", BROKEN, ids=lambda f: f.__name__)
def test_holds_here(case, make_model, behaviour):
    behaviour(make_model(case, tie_word_embeddings=behaviour is tied_embeddings))


@pytest.mark.parametrize("behaviour", BROKEN, ids=lambda f: f.__name__)
def test_fails_in_transformers_xlstm(behaviour):
    config = xLSTMConfig(
        vocab_size=61, hidden_size=128, num_hidden_layers=2, num_heads=2,
        tie_word_embeddings=behaviour is tied_embeddings,
    )  # fmt: skip
    error, message = BROKEN[behaviour]
    with pytest.raises(error, match=message):
        behaviour(xLSTMForCausalLM(config).eval())
