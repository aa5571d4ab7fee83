"""Commands look at their arguments at once, before they make an environment or build a kernel."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tooling import arguments

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "scripts/recipes/flash-rnn-python-5m.yaml"
SHIPPED = ROOT / "model_cards/flash-rnn-python-5m"
needs_no_gpu = pytest.mark.skipif(
    any(Path(file).exists() for file in arguments.GPU_FILES), reason="there is a GPU here"
)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "nosuch.yaml"], "argument recipe: nosuch.yaml does not exist"),
        (["train", "scripts"], "argument recipe: scripts is a folder, but must be a file"),
        (["train", RECIPE, "--text", "/no/text"], "argument --text: /no/text does not exist"),
        (["train", RECIPE, "--corpus", "/no.zip"], "argument --corpus: /no.zip does not exist"),
        (["evaluate", "perplexity", "/none", "--held-out"], "argument model: /none is no folder"),
        (["evaluate", "tasks", "model_cards/nothing", "--tasks", "x"], "model_cards/nothing is no"),
        (["evaluate", "lengths", SHIPPED, "--text", "/nothing"], "argument --text: /nothing does"),
        (["evaluate", "lengths", "scripts", "--held-out"], "scripts has no config.json"),
        (["demo", "--model", "/nothing"], "argument --model: /nothing is no folder"),
        pytest.param(
            ["train", RECIPE, "--device", "cuda"],
            "argument --device: cuda needs an NVIDIA GPU",
            marks=needs_no_gpu,
        ),
        pytest.param(
            ["evaluate", "lengths", SHIPPED, "--held-out", "--device", "cuda"],
            "argument --device: cuda needs an NVIDIA GPU",
            marks=needs_no_gpu,
        ),
    ],
)
def test_a_wrong_argument_makes_no_environment(tmp_path, command, message):
    script, *rest = command
    process = [sys.executable, "-S"]  # a Python without any package
    process += (
        [ROOT / "scripts", "tooling.demo"] if script == "demo" else [ROOT / "scripts" / script]
    )
    done = subprocess.run(
        [*process, *rest, "--home", tmp_path / "home"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["gpt2", "NX-AI/xLSTM-7b", str(SHIPPED)])
def test_models(name):
    assert arguments.model(name) == name


@pytest.mark.parametrize("name", ["", "./nothing", "a/b/c", "../x", "a b", "model_cards/nothing"])
def test_what_is_no_model(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(argparse.ArgumentTypeError, match="must be a model's folder or a name on"):
        arguments.model(name)


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    from tooling import environment

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    environment.check_torch("cpu")
    with pytest.raises(SystemExit, match=r"--device is cuda, but torch .* can use no GPU"):
        environment.check_torch("cuda")


def test_a_recipe_is_a_file_or_the_name_of_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert arguments.recipe(RECIPE.stem) == arguments.recipe(RECIPE.name) == RECIPE
    Path(RECIPE.name).touch()  # one's own of that name comes first
    assert arguments.recipe(RECIPE.name) == Path(RECIPE.name)
    for wrong in ("nosuch", f"folder/{RECIPE.name}", f"../{RECIPE.name}"):
        with pytest.raises(argparse.ArgumentTypeError, match="does not exist, but must be a file"):
            arguments.recipe(wrong)
