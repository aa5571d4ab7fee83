"""Tests that `flashcell serve` says in one line which model it cannot load, and why."""

import os
import shutil

import pytest

from flashcell.serving.command import make_parser, serve
from served import FOLDER


def refusal(model: object) -> str:
    with pytest.raises(SystemExit) as refused:
        serve(make_parser().parse_args([str(model), "--device", "cpu"]))
    said = str(refused.value)
    assert said.startswith(f"flashcell serve: the model is {model}, but: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
@pytest.mark.parametrize("option", ["--interval-ms", "--body-seconds", "--upscale-seconds"])
def test_numbers_out_of_bounds(capsys, option, value):
    from flashcell.serving.replicas.command import parse_arguments

    with pytest.raises(SystemExit):
        parse_arguments([str(FOLDER), "--ray", option, value])
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in said
    assert f"it is {value}, but must be" in said or f"invalid number value: '{value}'" in said


@pytest.mark.parametrize("part", [0.5, 0])
def test_weights_that_are_cut_off(tmp_path, part):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    weights = folder / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * part))
    assert "header" in refusal(folder)


def test_no_such_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "couldn't connect" in refusal("nope")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty")
