"""Ways to decode, also with assistance, changes to a model that a recorded step would not notice by itself,
and small models for weights of 8 and 4 bits."""

import copy

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cases import DEVICE
from flashcell import FlashMLSTMConfig, FlashRNNConfig
from flashcell.state.rollback import owed_tokens
from model_cases import state_tensors
from numerics import EPS, assert_close

SAME = 64 * EPS[torch.float32]  # of states after 40 tokens, read one by one or several at a time


def greedy(model, ids, new=12, **kwargs):
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs}
    return model.generate(ids, max_new_tokens=new, pad_token_id=0, **kwargs)


def greedy_with_cache(model, ids, new=24, **options):
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


def without_engine(model, work):
    model.decoder.mode = "eager"
    try:
        return work()
    finally:
        model.decoder.mode = "auto"


def same_as_plain(model, work):
    """Returns the result of the engine, asserting that the model without the engine gives the same."""
    got = work()
    assert model.decoder.path in ("graph", "tape"), model.decoder.reason
    assert torch.equal(got, without_engine(model, work))
    return got


CHANGES = {
    "data": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.clone()),
    "parameter": lambda m: setattr(
        m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())
    ),
    "module": lambda m: setattr(m.model.layers[0], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
    "adapter": lambda m: setattr(
        m.model.layers[0], "mlp", torch.nn.Sequential(m.model.layers[0].mlp)
    ),
    "hook": lambda m: m.model.layers[1].mixer.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None),
    "submodule moved": lambda m: m.model.layers[0]._apply(torch.clone),
    "backend": lambda m: setattr(m.config, "backend", "reference"),
    "assigned": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
}


def decode(model, ids, cache=None):
    """Returns the logits of every token, decoded one by one."""
    cache, steps = cache or DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            steps.append(model(token, past_key_values=cache).logits)
    return torch.cat(steps, 1)


# Small models whose linear layers get weights of 8 and 4 bits.
QUANTIZED_SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}
QUANTIZED_CONFIGS = {
    "lstm": lambda: FlashRNNConfig(**QUANTIZED_SIZES, cell="lstm", intermediate_size=128),
    "flash_gru": lambda: FlashRNNConfig(
        **QUANTIZED_SIZES, cell="flash_gru", intermediate_size=128, tie_word_embeddings=True
    ),
    "flash_mlstm": lambda: FlashMLSTMConfig(**QUANTIZED_SIZES),
    "fused": lambda: FlashMLSTMConfig(**QUANTIZED_SIZES, weight_mode="fused"),
}
KINDS = ["int8", "int4"] + ["fp8"] * (DEVICE == "cuda")  # those that a kernel decodes
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def small_model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(QUANTIZED_CONFIGS[kind](), dtype=DTYPE).eval()


def tokens(batch=2, length=7):
    return torch.randint(
        3, 60, (batch, length), generator=torch.Generator("cpu").manual_seed(1), device="cpu"
    ).to(DEVICE)


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits.float()
