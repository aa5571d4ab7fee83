"""Configurations: published sizes, bad input, saving and the Auto classes."""

import json
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import flashcell
from flashcell import FlashRNNConfig, FlashRNNForCausalLM
from flashcell.kernels.fused_rnn import CELLS


def parameters(**changes) -> int:
    with torch.device("meta"):
        return FlashRNNForCausalLM(FlashRNNConfig(**changes)).num_parameters()


@pytest.mark.parametrize(("heads", "millions"), [(12, 164.5), (1, 190.5)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_published_parameter_counts(heads, millions, norm):
    """FlashRNN (arXiv 2412.07752), table of the language models: the defaults are its 165M model."""
    assert round(parameters(num_heads=heads, norm=norm) / 1e6, 1) == millions


def test_at_most_twenty_fields():
    assert len(FlashRNNConfig.__annotations__) - 1 <= 20  # one is a ClassVar


BAD = {
    "sizes are positive": ({"hidden_size": 0}, "hidden_size is 0, but must be at least 1"),
    "layers": ({"num_hidden_layers": -1}, "num_hidden_layers is -1, but must be at least 1"),
    "vocabulary": ({"vocab_size": 0}, "vocab_size is 0, but must be at least 1"),
    "mlp": ({"intermediate_size": 0}, "intermediate_size is 0, but must be at least 1"),
    "no heads": ({"num_heads": 0}, "num_heads is 0, but must be at least 1"),
    "heads": ({"num_heads": 7}, "num_heads is 7, but must divide hidden_size = 768"),
    "type": ({"hidden_size": "768"}, "'hidden_size' expected int, got str"),
    "fraction": ({"num_heads": 1.5}, "'num_heads' expected int, got float"),
    "cell": ({"cell": "ltsm"}, "'cell' expected one of .*lstm.*gru.*rnn.*slstm.*got ltsm"),
    "case": ({"cell": "LSTM"}, "'cell' expected one of .* got LSTM"),
    "nonlinearity": ({"cell": "rnn", "nonlinearity": "gelu"}, "'nonlinearity' .* got gelu"),
    "no choice": ({"nonlinearity": "relu"}, "must be 'tanh' unless cell is 'rnn'; cell is 'lstm'"),
    "norm": ({"norm": "batch"}, "'norm' expected one of .* got batch"),
    "eps": ({"norm_eps": 0.0}, "norm_eps is 0.0, but must be a positive, finite number"),
    "std": ({"initializer_range": math.inf}, "initializer_range is inf, but must be a positive"),
    "nan": ({"norm_eps": math.nan}, "norm_eps is nan, but must be a positive, finite number"),
    "clip": ({"grad_clip": -1.0}, "grad_clip is -1.0, but must be None or a number >= 0"),
    "clip nan": ({"grad_clip": math.nan}, "grad_clip is nan, but must be None or a number >= 0"),
    "clip type": ({"grad_clip": "1"}, "'grad_clip'.*str"),
    "backend": ({"backend": "gpu"}, "'backend' expected one of .* got gpu"),
    "true is no number": ({"num_heads": True}, "expected int, got bool"),
    "flag": ({"use_cache": "yes"}, "'use_cache' expected bool, got str"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_values_are_named(what):
    changes, message = BAD[what]
    with pytest.raises(StrictDataclassError, match=f"(?s){message}"):
        FlashRNNConfig(**changes)


def test_the_cell_names_are_the_kernel_s():
    for cell, nonlinearity in [("lstm", "tanh"), ("gru", "tanh"), ("rnn", "relu"), ("rnn", "tanh")]:
        assert FlashRNNConfig(cell=cell, nonlinearity=nonlinearity).kernel_cell in CELLS
    assert FlashRNNConfig(cell="slstm").kernel_cell in CELLS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(case, make_model, tokens, tmp_path, tied, dtype):
    model, ids = make_model(case, tie_word_embeddings=tied).to(dtype), tokens(2, 7)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) != tied
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    head, embeddings = loaded.lm_head.weight, loaded.get_input_embeddings().weight
    assert (head is embeddings) == tied
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model.base_model)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    for name, want in model.base_model.state_dict().items():
        assert torch.equal(classifier.base_model.state_dict()[name], want.float()), name


def test_the_backend_is_never_saved(make_model, tmp_path):
    model = make_model(backend="reference")
    model.save_pretrained(tmp_path)
    assert "backend" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path).backend == "auto"
    chosen = AutoModelForCausalLM.from_pretrained(tmp_path, backend="reference")
    assert chosen.config.backend == "reference"
    assert model.config.backend == "reference"


def test_initial_weights():
    """Orthogonal recurrent matrices; states that last at the start; 0.02 elsewhere."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_heads": 2}
    for cell in ("lstm", "gru", "rnn", "slstm"):
        model = FlashRNNForCausalLM(FlashRNNConfig(vocab_size=61, cell=cell, **sizes))
        mixers = [layer.mixer for layer in model.model.layers]
        for mixer in mixers:
            matrices = mixer.recurrent_weight.detach().flatten(0, 1)
            eye = torch.eye(32).expand_as(matrices)
            torch.testing.assert_close(matrices @ matrices.mT, eye, atol=1e-5, rtol=0)
            assert 0.018 < mixer.in_proj.weight.std() < 0.022
        bias = torch.stack([mixer.gate_bias.detach() for mixer in mixers])
        keep, others = bias[:, 1:2], torch.cat([bias[:, :1], bias[:, 2:]], 1)
        assert not others.any()
        if cell in ("lstm", "gru"):
            assert (keep == 1).all()
        if cell == "slstm":
            assert (keep[..., 0] == 5).all()
            assert (keep[..., -1] == -7).all()
            assert (keep.diff(dim=-1) < 0).all()
            assert (keep.diff(dim=0)[..., 1:-1] > 0).all(), "deeper layers remember longer"


def test_registered_on_import(make_config):
    config = make_config()
    assert type(AutoModel.from_config(config)) is flashcell.FlashRNNModel
    assert type(AutoModelForCausalLM.from_config(config)) is FlashRNNForCausalLM
