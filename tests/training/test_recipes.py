"""Tests that the published recipes match the papers: models by their parameters, schedules, tokens."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from train_cases import RECIPE, text_recipe, write_recipe
from training.recipe import Recipe, variants
from training.step import make_config, make_optimizer, schedule

ROOT = Path(__file__).resolve().parents[2]

RECIPES = ROOT / "scripts/recipes"
# Parameters as built, exactly; published: 165M, 164.5 M and 190.5 M (FlashRNN), 406M, 1.42B, 2.90B
# and 6.76B, Transformers 412M, 1.44B, 2.80B, 6.89B, Mamba2 409M, 1.43B, 2.83B, 6.96B (ParaRNN,
# table 3).
PARAMETERS = {
    "flashrnn": {
        "lstm_165m": 164_544_768,
        "lstm_165m_1head": 190_497_024,
        "slstm_165m": 164_544_768,
        "slstm_165m_1head": 190_497_024,
        "transformer_165m": 162_148_608,
    },
    "pararnn": {
        "flash_gru_400m": 405_644_288,
        "flash_gru_1b": 1_415_268_352,
        "flash_gru_3b": 2_901_854_720,
        "flash_gru_7b": 6_756_896_768,
        "flash_lstm_400m": 405_693_440,
        "flash_lstm_1b": 1_415_366_656,
        "flash_lstm_3b": 2_902_018_560,
        "flash_lstm_7b": 6_757_158_912,
        "transformer_400m": 411_616_256,
        "transformer_1b": 1_439_795_200,
        "transformer_3b": 2_795_932_160,
        "transformer_7b": 6_889_410_560,
        "mamba2_400m": 409_072_640,
        "mamba2_1b": 1_425_263_104,
        "mamba2_3b": 2_832_074_240,
        "mamba2_7b": 6_959_771_648,
    },
    "tfla": {
        "flash_mlstm_160m_6heads": 162_268_560,
        "flash_mlstm_160m_12heads": 162_379_296,
        "flash_mlstm_400m_8heads": 406_957_440,
        "flash_mlstm_400m_16heads": 407_351_040,
        "flash_mlstm_1.4b_4heads": 1_420_646_592,
        "flash_mlstm_1.4b_8heads": 1_421_040_000,
        "flash_mlstm_1.4b_16heads": 1_421_826_816,
        "flash_mlstm_sigmoid_160m_6heads": 162_268_560,
        "flash_mlstm_sigmoid_400m_8heads": 406_957_440,
        "flash_mlstm_sigmoid_1.4b_8heads": 1_421_040_000,
        "transformer_160m": 162_148_608,
        "transformer_400m": 406_539_264,
        "transformer_1.4b": 1_420_204_032,
    },
    "flash-rnn-python-5m": {None: 4_726_528},
    "flash-gru-python-5m": {None: 4_938_496},
}
TOKENS = {  # published, in billions: FlashRNN's appendix J, ParaRNN's table 4, TFLA's table 4
    "lstm_165m": 15.7, "flash_gru_400m": 10.5, "flash_gru_1b": 28.8, "flash_lstm_3b": 57.7,
    "mamba2_7b": 138.4, "flash_mlstm_160m_6heads": 19, "flash_mlstm_400m_8heads": 24,
    "flash_mlstm_1.4b_8heads": 33,
}  # fmt: skip
ALL = [(name, variant) for name, counts in PARAMETERS.items() for variant in counts]


def read(name: str, variant: str | None) -> Recipe:
    return Recipe.read(RECIPES / f"{name}.yaml", [], variant)


def test_every_recipe_is_here():
    found = {file.stem: set(variants(file)) for file in RECIPES.glob("*.yaml")}
    assert found == {name: set(counts) for name, counts in PARAMETERS.items()}


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_a_recipe_makes_its_model(name, variant):
    recipe = read(name, variant)
    assert recipe.name == (variant or name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(recipe))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name][variant]
    if variant in TOKENS:
        billions = recipe.batch * recipe.length * recipe.steps / 1e9
        assert billions == pytest.approx(TOKENS[variant], rel=0.02)
    assert recipe.batch % (8 * recipe.micro_batch or 1) == 0  # on a node of eight GPUs
    decayed = sum(p.numel() for p in make_optimizer(model, recipe)[0].param_groups[0]["params"])
    assert 0.5 < decayed / PARAMETERS[name][variant] < 1


def test_schedules():
    rate = schedule(read("flashrnn", "lstm_165m"))  # cosine to a tenth
    assert rate(0) == pytest.approx(1 / 750)
    assert rate(750) == 1
    assert rate(15_375) == pytest.approx(0.55)
    assert rate(30_000) == pytest.approx(0.1)
    rate = schedule(read("pararnn", "flash_gru_400m"))  # cosine to nothing
    assert rate(11_000) == pytest.approx(0.5)
    assert rate(20_000) == 0
    rate = schedule(read("tfla", "flash_mlstm_160m_6heads"))  # cosine to a tenth, linear to nothing
    assert rate(34_999) == pytest.approx(0.1, rel=1e-3)
    assert rate(35_000) == pytest.approx(0.1)
    assert rate(35_500) == pytest.approx(0.05)
    assert rate(36_000) == 0


def test_detached_decay_does_not_depend_on_the_learning_rate():
    """A step reduces a weight without gradient by weight_decay times the schedule's factor."""
    for rate in (1e-2, 1e-4):
        recipe = Recipe(**{**RECIPE, "learning_rate": rate, "weight_decay": 0.01, "warmup": 0,
                           "detached_decay": True})  # fmt: skip
        table = torch.nn.Linear(2, 2, bias=False)
        table.weight.data.fill_(1.0)
        optimizer, _ = make_optimizer(table, recipe)
        table.weight.grad = torch.zeros(2, 2)
        optimizer.step()
        torch.testing.assert_close(table.weight.data, torch.full((2, 2), 0.99))


def test_embeddings_are_spared_where_the_recipe_says_so():
    for spared in (True, False):
        recipe = Recipe(**{**RECIPE, "decay_embeddings": not spared})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_config(read("tfla", "transformer_1.4b")))
        groups = make_optimizer(model, recipe)[0].param_groups
        sides = [any(p is model.get_input_embeddings().weight for p in g["params"]) for g in groups]
        assert sides == [not spared, spared]
        assert any(p is model.lm_head.weight for p in groups[0]["params"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name is '', but must be that of a folder"),
        ({"name": "../runs"}, "name is '../runs', but must be that of a folder"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be at least 1"),
        ({"warmup": -1}, "warmup is -1, but must be at least 0"),
        ({"learning_rate": 0}, "learning_rate is 0, but must be above 0"),
        ({"data": {"path": "text"}}, "exactly one of data and corpus_sha256 must be given"),
        ({"warmup": 39, "cooldown": 2}, "warmup + cooldown is 41, but must be at most steps = 40"),
        ({"isolate": False}, "carry is true, but must be false unless isolate is true"),
        ({"gradient_checkpointing": True}, "carry is true, but must be false under gradient_check"),
        ({"dropout": 1.0}, "dropout is 1.0, but must be at least 0, below 1"),
        ({"precision": "fp8"}, "precision is 'fp8', but must be 'no' or 'bf16'"),
        ({"betas": 0.9}, "betas is 0.9, but must be list"),
        ({"betas": [0.9]}, "betas is [0.9], but must be two numbers from 0, below 1"),
        ({"betas": [0.9, 1.0]}, "betas is [0.9, 1.0], but must be two numbers from 0, below 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0, below 2^64"),
        ({"clip": 0.0}, "clip is 0.0, but must be above 0"),
        ({"clip": float("nan")}, "clip is nan, but must be above 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf, but must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, but must be at least 0"),
        ({"z_loss": float("nan")}, "z_loss is nan, but must be at least 0"),
        ({"batch": True}, "batch is True, but must be int"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"^[^\n]*yaml: ") as caught:
        Recipe.read(write_recipe(tmp_path / "tiny.yaml", **changes), [])
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "a: [1"])
def test_what_is_no_recipe_is_refused(tmp_path, text):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tiny\.yaml"):
        Recipe.read(path, [])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "llama"}, "carry is true, but must be false: llama has no state"),
        ({"model_type": "flash"}, "model.model_type is 'flash', but must be a type"),
        ({"model_type": "flash_rnn", "preset": "x"}, "preset is 'x', but must be one of lstm_165m"),
        ({"model_type": "llama", "preset": "x"}, "model.preset is 'x', but llama has no presets"),
        (
            {"model_type": "flash_rnn", "cel": "gru"},
            "model has cel, but flash_rnn has no such settings",
        ),
        (
            {"model_type": "flash_rnn", "vocab_size": 7},
            "model.vocab_size is 7, but must be left out",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(tmp_path, model, message):
    with pytest.raises(ValueError, match=message):
        make_config(Recipe(**text_recipe(tmp_path, model=model)))


def test_values_are_what_they_look_like(tmp_path):
    words = [
        "precision=no",
        "learning_rate=1e-4",
        "model.cell=gru",
        "data.path=json",
        "carry=false",
    ]
    path = write_recipe(tmp_path / "tiny.yaml", **text_recipe(tmp_path))
    recipe = Recipe.read(path, words)
    assert (recipe.precision, recipe.learning_rate, recipe.carry) == ("no", 1e-4, False)
    assert (recipe.model["cell"], recipe.data["path"]) == ("gru", "json")


def test_a_variant_must_be_named():
    for variant in (None, "lstm_7b"):
        with pytest.raises(
            ValueError, match=f"--variant is {variant}, but must be one of lstm_165m"
        ):
            read("flashrnn", variant)
    with pytest.raises(ValueError, match="--variant is x, but must be one of none"):
        read("flash-rnn-python-5m", "x")
