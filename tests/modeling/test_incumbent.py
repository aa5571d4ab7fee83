"""Tests what the recurrent models of transformers get wrong, by the same checks that ours pass.

Every behaviour is a function that raises if it does not hold. If a release of transformers mends
one, its line in BROKEN fails and must be removed; the table of modeling/NOTEBOOK.md is made from
BROKEN.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, xLSTMConfig, xLSTMForCausalLM

from cases import DEVICE
from numerics import EPS, assert_close

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "modeling/NOTEBOOK.md").read_text(encoding="utf-8")
SAME = (16 if DEVICE == "cpu" else 24) * EPS[torch.float32]  # see test_boundaries.py
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
    """A conversation continues from the cache that generate returned."""
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    turn = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    text = torch.cat([turn.sequences, PROMPT], 1)
    mask = torch.ones_like(text)
    takes = "past_key_values" in inspect.signature(model.forward).parameters
    cache = turn["past_key_values" if "past_key_values" in turn else "cache_params"]
    cache = {"past_key_values" if takes else "cache_params": cache}
    got = model.generate(text, attention_mask=mask, **cache, **options)
    want = model.generate(text, attention_mask=mask, **options)
    # the likeliest tokens of a wrong state are sometimes right; its logits never are
    assert_close("logits", got.logits[0], want.logits[0], SAME)
    assert torch.equal(got.sequences, want.sequences), "another text than from the beginning"


def train(model):
    ids = torch.randint(2, 60, (1, 64))  # a whole chunk of transformers' model
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def training_by_default(model):
    train(model)


def training_in_bf16(model):
    model.config.use_cache = False
    train(model.to(torch.bfloat16))


def fp32_states_in_bf16(model):
    outputs = model.to(torch.bfloat16)(PROMPT, use_cache=True)
    if type(model).__module__.startswith("flashcell."):
        states = [s for layer in outputs.past_key_values.layers for s in layer.get_states("cell")]
    elif isinstance(model, Mamba2ForCausalLM):
        layers = outputs.cache_params.layers
        states = [s for layer in layers for s in layer.recurrent_states.values()]
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


LEAK = (AssertionError, "logits: relative rms error")
BROKEN = {  # model -> behaviour -> its failure
    "xLSTM": {
        left_padding: LEAK,
        beam_search: (ValueError, "the cache cannot be reordered"),
        continuation: (AttributeError, "is_compileable"),
        training_by_default: (RuntimeError, "modified by an inplace operation"),
        training_in_bf16: (RuntimeError, "same dtype|scalar type"),
        fp32_states_in_bf16: (AssertionError, "bfloat16"),
        tied_embeddings: (AssertionError, "another matrix"),
        logits_to_keep: (AssertionError, "6 positions"),
        packed_documents: LEAK,
    },
    "Mamba2": {
        continuation: LEAK,  # the model reads the whole text again on top of the state
        packed_documents: LEAK,
    },
}
BEHAVIOURS = list(BROKEN["xLSTM"])
FEATURES = {  # with the names in modeling/NOTEBOOK.md
    left_padding: "left padding: a row is what it is alone",
    beam_search: "beam search",
    continuation: "a conversation goes on from the returned cache",
    training_by_default: "training as configured",
    training_in_bf16: "training in bf16",
    fp32_states_in_bf16: "states in fp32 under bf16 weights",
    tied_embeddings: "tied embeddings",
    logits_to_keep: "`logits_to_keep`",
    packed_documents: "documents packed by position_ids, cu_seq_lens or seq_idx stay apart",
}


def make_incumbent(name, **config):
    """A model with large weights, as ours: with nearly equal logits rounding would choose the next
    token."""
    config = {"vocab_size": 61, "num_hidden_layers": 2, "initializer_range": 0.3, **config}
    if name == "xLSTM":
        return xLSTMForCausalLM(xLSTMConfig(hidden_size=128, num_heads=2, **config)).eval()
    config |= {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}
    config |= {"chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return Mamba2ForCausalLM(Mamba2Config(**config)).eval()


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda f: f.__name__)
def test_holds_here(case, make_model, behaviour):
    behaviour(make_model(case, tie_word_embeddings=behaviour is tied_embeddings))


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BROKEN)
def test_in_transformers(name, behaviour):
    model = make_incumbent(name, tie_word_embeddings=behaviour is tied_embeddings)
    if behaviour not in BROKEN[name]:
        return behaviour(model)
    error, message = BROKEN[name][behaviour]
    with pytest.raises(error, match=message):
        behaviour(model)


def test_the_page_says_so():
    """A cell of the table begins with yes if and only if the behaviour holds."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    said = {row[0].strip(): row[1:4] for row in rows}
    for behaviour, words in FEATURES.items():
        holds = [True, *(behaviour not in BROKEN[name] for name in ("xLSTM", "Mamba2"))]
        assert [cell.startswith("yes") for cell in said[words]] == holds, words


def test_the_page_names_tests_that_exist():
    source = ""
    for file, name in re.findall(r"`((?:tests/)?(?:\w+/)*test_\w+\.py)?(?:::)?(test_\w+)?`", PAGE):
        if file:
            source = (ROOT / (file if "/" in file else f"tests/modeling/{file}")).read_text()
        assert not name or f"def {name}(" in source, name
