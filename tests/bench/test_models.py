"""Tests bench_models --training on the CPU, with tiny models."""

import csv
from argparse import ArgumentParser
from functools import partial

import pytest

import flashcell
from bench.models import training as bench

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
LLAMA |= {"num_attention_heads": 2}


def shrink(provider: bench.Provider, model: dict) -> bench.Provider:
    return provider._replace(rows=2, length=8, model=tuple(model.items()))


@pytest.fixture
def small(monkeypatch):
    """Shrinks every case, of flashcell and of the Transformer, to one small size."""
    cases = {
        name: case._replace(
            ours=shrink(case.ours, SMALL), transformer=shrink(case.transformer, LLAMA)
        )
        for name, case in bench.CASES.items()
    }
    monkeypatch.setattr(bench, "CASES", cases)
    return cases


def arguments(*words: str):
    parser = ArgumentParser()
    parser.add_argument("--training", nargs="+")
    parser.set_defaults(device="cpu", backend="reference")
    bench.add_arguments(parser)
    return parser.parse_args([*words, "--steps", "2", "--commit", "c"])


def test_providers_have_the_same_tokens_and_nearly_the_same_weights():
    import torch
    from transformers import AutoModelForCausalLM

    from training.step import make_config

    for case in bench.CASES.values():
        sizes, settings = [], []
        for provider in (case.ours, case.transformer):
            recipe = provider.recipe()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(make_config(recipe))
            sizes.append(sum(p.numel() for p in model.parameters()))
            settings.append((recipe.batch, recipe.length, recipe.vocab_size, provider.micro_steps))
        # published: 190 M and 162 M parameters.
        one_head = 1.18 if case.name.endswith("_1head") else 1.04
        assert 1 / 1.04 < sizes[0] / sizes[1] < one_head, case.name
        assert settings[0] == settings[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lstm_165m", marks=pytest.mark.slow),
        "flash_gru_7b_layer",
        pytest.param("flash_mlstm_400m", marks=pytest.mark.slow),
    ],
)
def test_both_providers_are_measured_kept_and_compared(small, tmp_path, monkeypatch, capsys, name):
    limits = {0.0: False, float("inf"): True}
    for limit, within in limits.items():
        monkeypatch.setitem(small, name, small[name]._replace(limit=limit))
        words = ("--training", name, "--append", "--results", str(tmp_path))
        assert bench.compare(arguments(*words)) is within
    (path,) = tmp_path.glob("*-training.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == ["ours", "transformer"] * 2
    ours, theirs, *_ = rows
    assert float(ours["ratio"]) == pytest.approx(
        float(ours["p50_ms"]) / float(theirs["p50_ms"]), rel=2e-3
    )
    assert theirs["ratio"] == ""
    tokens = 2 * 8 * int(ours["micro_steps"])
    rate = tokens / float(ours["p50_ms"]) * 1e3
    assert float(ours["tokens_s"]) == pytest.approx(rate, rel=2e-3)
    assert float(ours["p50_ms"]) <= float(ours["p95_ms"]) <= float(ours["max_ms"])
    assert "ABOVE 0" in capsys.readouterr().out


def test_peers_layers_are_kept_beside_ours(small, tmp_path, monkeypatch, capsys):
    from report.tables_training import training_table

    limits = small["lstm_165m_1head"]._replace(limit=float("inf"))
    one = limits._replace(ours=limits.ours._replace(model=(*limits.ours.model, ("num_heads", 1))))
    monkeypatch.setitem(small, "lstm_165m_1head", one)
    # oneDNN has no bf16 LSTM without AVX-512.
    monkeypatch.setitem(bench.PEERS, "nn.LSTM", lambda model, rows: None)

    def breaks(model, rows):
        raise RuntimeError("out of memory\nat the first step")

    monkeypatch.setitem(bench.PEERS, "flashrnn", breaks)
    names = ("flashrnn", "nn.LSTM", "mlstm_kernels")
    words = ("--training", "lstm_165m_1head", "--peers", *names, "--append")
    assert bench.compare(arguments(*words, "--results", str(tmp_path)))
    (path,) = tmp_path.glob("*-training.csv")
    text = training_table(path)
    assert "| lstm_165m_1head | nn.LSTM | " in text
    assert "mlstm_kernels" not in text
    said = capsys.readouterr().out
    assert "lstm_165m_1head      mlstm_kernels: mlstm_kernels has the mLSTM alone\n" in said
    assert "lstm_165m_1head      flashrnn: out of memory\n" in said


@pytest.mark.parametrize("peer", ["nn.LSTM", "flashrnn", "mlstm_kernels"])
def test_a_peers_layer_leaves_the_model_as_it_was(peer):
    import torch

    from bench.models import training_peers as peers

    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "backend": "reference"}
    ids = torch.randint(20, (2, 128))
    if peer == "mlstm_kernels":
        pytest.importorskip("mlstm_kernels")
        model = flashcell.FlashMLSTMForCausalLM(flashcell.FlashMLSTMConfig(num_heads=2, **sizes))
        swap = partial(peers.mlstm_kernels, kernel="chunkwise--native_autograd")
    else:
        swap, sizes = partial(peers.PEERS[peer]), sizes | {"intermediate_size": 32, "num_heads": 1}
        model = flashcell.FlashRNNForCausalLM(flashcell.FlashRNNConfig(cell="lstm", **sizes))
    if peer == "flashrnn":
        pytest.importorskip("flashrnn")
        swap = partial(peers.flashrnn, backend="vanilla")
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        swap(model, 2)
        got = model(ids, use_cache=False).logits
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_cases_by_pattern():
    names = [case.name for case in bench.choose(["flash_mlstm*", "lstm_165m", "flash_*"])]
    assert names[:3] == ["flash_mlstm_400m", "flash_mlstm_7b_layer", "lstm_165m"]
    assert len(names) == len(set(names)) == 7
    assert bench.unknown(["lstm*"]) is None
    assert "must fit at least one of lstm_165m, " in bench.unknown(["lstm*", "nothing"])
