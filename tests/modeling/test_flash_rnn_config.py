"""Tests flash_rnn's configuration: published sizes and initial weights, bad input."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from flashcell import FlashRNNConfig, FlashRNNForCausalLM
from flashcell.kernels.diagonal_rnn import CELLS as DIAGONAL_CELLS
from flashcell.kernels.fused_rnn import CELLS
from flashcell.layers import diagonal_mixer


def parameters(config: FlashRNNConfig) -> int:
    with torch.device("meta"):
        return FlashRNNForCausalLM(config).num_parameters()


MILLIONS = {
    "lstm_165m": 164.5,
    "slstm_165m": 164.5,
    "lstm_165m_1head": 190.5,
    "slstm_165m_1head": 190.5,
}
EXACT = {
    "flash_gru_400m": 405_644_288,
    "flash_gru_1b": 1_415_268_352,
    "flash_gru_3b": 2_901_854_720,
    "flash_gru_7b": 6_756_896_768,
}


def test_published_parameter_counts():
    """Every preset has as many parameters as published (arXiv 2412.07752; 2510.21450, table 3)."""
    counts = {name: parameters(FlashRNNConfig.preset(name)) for name in FlashRNNConfig.presets}
    for name, millions in MILLIONS.items():
        assert round(counts.pop(name) / 1e6, 1) == millions, name
    for name, exact in EXACT.items():
        assert counts.pop(name) == exact, name
        lstm = name.replace("gru", "lstm")  # two peepholes more per channel
        config = FlashRNNConfig.preset(lstm)
        assert counts.pop(lstm) == exact + 2 * config.hidden_size * config.num_hidden_layers, lstm
    assert not counts


def test_presets():
    assert parameters(FlashRNNConfig()) == parameters(FlashRNNConfig.preset("lstm_165m"))
    config = FlashRNNConfig.preset("flash_gru_1b", hidden_size=1024, backend="reference")
    assert (config.cell, config.hidden_size, config.num_heads) == ("flash_gru", 1024, 4)
    with pytest.raises(ValueError, match="preset is 'flash_gru_2b', but must be one of lstm_165m"):
        FlashRNNConfig.preset("flash_gru_2b")


def test_at_most_twenty_fields():
    assert len(FlashRNNConfig.__annotations__) - 1 <= 20  # one is a ClassVar


GRU = {"cell": "flash_gru"}
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
    "no method": (
        {"method": "sequential"},
        "method is 'sequential', but must be 'auto' unless cell is 'flash_",
    ),
    "no tol": ({"tol": 1e-3}, "tol is 0.001, but must be None unless cell is 'flash_gru' or"),
    "no window": ({"conv_kernel": 7}, "conv_kernel is 7, but must be 4 unless cell is 'flash_gru'"),
    "no bound": ({"max_recurrent": None}, "max_recurrent is None, but must be 0.5 unless cell is"),
    "no save": (GRU | {"save": "recompute"}, "save is 'recompute', but must be 'gates' unless"),
    "no clip": (GRU | {"grad_clip": 1.0}, "grad_clip is 1.0, but must be None unless cell is"),
    "max": (GRU | {"max_recurrent": 0.0}, "max_recurrent is 0.0, but must be a positive, finite"),
    "window": (GRU | {"conv_kernel": 1}, "conv_kernel is 1, but must be at least 2"),
    "iterations": (GRU | {"max_iters": 0}, "max_iters is 0, but must be None or from 1 to"),
    "many": (GRU | {"max_iters": 2**31}, "max_iters is 2147483648, but must be None or from 1 to"),
    "way": (GRU | {"method": "fast"}, "'method' expected one of .* got fast"),
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


def test_layer_types_that_another_program_saved():
    config = FlashRNNConfig(num_hidden_layers=2, layer_types=["recurrent_state"] * 2)
    assert "layer_types" not in config.to_dict()
    for other in (["full_attention"] * 2, ["recurrent_state"], 2):
        with pytest.raises(ValueError, match="must be 'recurrent_state' for each of 2 layers"):
            FlashRNNConfig(num_hidden_layers=2, layer_types=other)


def test_the_cell_names_are_the_kernel_s():
    for cell, nonlinearity in [("lstm", "tanh"), ("gru", "tanh"), ("rnn", "relu"), ("rnn", "tanh")]:
        assert FlashRNNConfig(cell=cell, nonlinearity=nonlinearity).kernel_cell in CELLS
    assert FlashRNNConfig(cell="slstm").kernel_cell in CELLS
    assert set(diagonal_mixer.CELLS) == set(DIAGONAL_CELLS)


def test_initial_weights():
    """Recurrent matrices are orthogonal, biases of the gates that keep the state make it last, and
    input projections have a standard deviation of 0.02."""
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


def test_initial_weights_of_diagonal_cells():
    """As published: fan-in^-1/2 cut at three deviations, reduced with depth for the output layers,
    and the cell's own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_heads": 2}
    for cell in ("flash_gru", "flash_lstm"):
        model = FlashRNNForCausalLM(FlashRNNConfig(vocab_size=512, cell=cell, **sizes))
        linear = {"model.embed_tokens": 64**-0.5, "lm_head": 64**-0.5}
        for i in range(3):
            depth, layer = (2 * (i + 1)) ** -0.5, f"model.layers.{i}."
            linear |= {layer + name: 64**-0.5 for name in ("mixer.in_proj", "mlp.up_proj")}
            linear |= {
                layer + "mixer.out_proj": 64**-0.5 * depth,
                layer + "mlp.down_proj": 96**-0.5 * depth,
            }
            mixer = model.model.layers[i].mixer
            assert not mixer.cell.in_proj.bias.any()
            assert (mixer.skip == 1).all()
            assert mixer.cell.in_proj.weight.abs().max() <= (6 / 32) ** 0.5
            for rows in (p for name, p in mixer.cell.named_parameters() if name in "ap"):
                assert 0.8 < rows.std() * 64**0.5 < 1.2
                assert rows.abs().max() <= 3 * 64**-0.5
            assert mixer.conv.weight.abs().max() <= 0.5  # torch's: uniform within fan-in^-1/2
            assert 0.2 < mixer.conv.weight.std() < 0.35
        for name, deviation in linear.items():
            weight = model.get_submodule(name).weight
            assert 0.9 < weight.std() / (0.987 * deviation) < 1.1, name  # cut off at three
            assert weight.abs().max() <= 3 * deviation, name
