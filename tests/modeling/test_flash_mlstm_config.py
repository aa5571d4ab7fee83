"""Tests flash_mlstm's configuration: published sizes, initial weights, bad input."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from flashcell import FlashMLSTMConfig, FlashMLSTMForCausalLM

SMALL = {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("flash_mlstm_160m_6heads", 162_268_560),
        ("flash_mlstm_160m_12heads", 162_379_296),
        ("flash_mlstm_400m_8heads", 406_957_440),
        ("flash_mlstm_400m_16heads", 407_351_040),
        ("flash_mlstm_1.4b_4heads", 1_420_646_592),
        ("flash_mlstm_1.4b_8heads", 1_421_040_000),
        ("flash_mlstm_1.4b_16heads", 1_421_826_816),
        ("flash_mlstm_7b", 6_865_424_896),
    ],
)
def test_parameter_counts(preset, parameters):
    """The published count of the 7B; the others by hand: two embeddings, and for each block q, k
    (d/2), v, o, out (d), two gates with biases, three MLP matrices and three norms."""
    config = FlashMLSTMConfig.preset(preset)
    d, h, inner = config.hidden_size, config.num_heads, config.intermediate_size
    block = d * d + 3 * d * d + 2 * (d * h + h) + 3 * d * inner + 3 * d
    with torch.device("meta"):
        count = FlashMLSTMForCausalLM(config).num_parameters()
    assert count == parameters
    assert count == 2 * config.vocab_size * d + config.num_hidden_layers * block + d


def test_initial_weights():
    config = FlashMLSTMConfig(**{**SMALL, "num_heads": 4})
    for mode in ("single", "fused"):
        config.weight_mode = mode
        model = FlashMLSTMForCausalLM(config)
        small, residual = math.sqrt(2 / (5 * 128)), 2 / (2 * math.sqrt(128))
        for block in model.backbone.blocks:
            layer, ffn = block.mlstm_layer, block.ffn
            if mode == "fused":
                i, f = layer.ifgate_preact.bias.chunk(2)
                wide = [layer.qkv_opreact, ffn.proj_up_gate_z]
                gates = [layer.ifgate_preact]
            else:
                i, f = layer.igate_preact.bias, layer.fgate_preact.bias
                wide = [
                    layer.q,
                    layer.k,
                    layer.v,
                    layer.ogate_preact,
                    ffn.proj_up,
                    ffn.proj_up_gate,
                ]
                gates = [layer.igate_preact, layer.fgate_preact]
            assert (i == -10).all()
            assert torch.equal(f, torch.linspace(3, 6, 4))
            assert not any(gate.weight.any() for gate in gates)
            for linear in wide:
                assert 0.95 < linear.weight.std() / small < 1.05
            assert 0.95 < layer.out_proj.weight.std() / residual < 1.05
            inner = 2 / (2 * math.sqrt(config.intermediate_size))
            assert 0.95 < ffn.proj_down.weight.std() / inner < 1.05
            assert (layer.multihead_norm.weight == 1).all()
        assert 0.95 < model.backbone.embeddings.weight.std() / small < 1.05


BAD = {
    "sizes": ({"num_heads": 0}, "num_heads is 0, but must be at least 1"),
    "heads": ({"num_heads": 3}, "qk_dim_factor makes a width of 2048, .* multiple of 8 num_heads = 24"),
    "values": ({"v_dim_factor": 0.01}, "v_dim_factor makes a width of 40, .* 8 num_heads = 64"),
    "cap": ({"gate_soft_cap": 0.0}, "gate_soft_cap is 0.0, but must be a positive, finite number"),
    "logits": ({"output_logit_soft_cap": math.inf}, "output_logit_soft_cap is inf, but must be"),
    "eps": ({"eps": -1e-6}, "eps is -1e-06, but must be a finite number >= 0"),
    "gate": ({"input_gate": "softmax"}, "'input_gate' expected one of .* got softmax"),
    "bias": ({"input_gate_bias_init": -math.inf}, "input_gate_bias_init is -inf, but must be finite"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0, but must be None or from 1 to"),
    "long chunk": ({"chunk_size": 10**20}, "chunk_size is 1(0{20}), but must be None or from 1 to"),
    "inner": ({"ffn_proj_factor": 1e-30}, "ffn_proj_factor is 1e-30, but must be at least 1 / hidden"),
    "mode": ({"weight_mode": "double"}, "'weight_mode' expected one of .* got double"),
    "norm": ({"head_norm": "batch"}, "'head_norm' expected one of .* got batch"),
    "fixed": (
        {"weight_mode": "fused", "learnable_input_gate": False},
        "weight_mode is 'fused', but must be 'single'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_values_are_named(what):
    changes, message = BAD[what]
    with pytest.raises(StrictDataclassError, match=f"(?s){message}"):
        FlashMLSTMConfig(**changes)


def test_what_no_published_model_has_is_refused():
    for name, value in (("use_bias", True), ("add_out_norm", False)):
        with pytest.raises(ValueError, match=f"{name} is {value}, but must be {not value}"):
            FlashMLSTMConfig(**{name: value})
