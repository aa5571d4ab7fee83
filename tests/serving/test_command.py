"""Tests that `flashcell serve` says in one line what it cannot load or use, and why."""

import os
import shutil
import socket

import pytest
import torch

from flashcell.serving.command import make_parser, serve
from served import FOLDER


def refusal(model: object) -> str:
    with pytest.raises(SystemExit) as refused:
        serve(make_parser().parse_args([str(model), "--device", "cpu", "--port", "0"]))
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


@pytest.mark.parametrize("option", ["--api-key-file", "--chat-template", "--prefix-state"])
def test_files_that_are_not_there(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        make_parser().parse_args([str(FOLDER), option, str(tmp_path / "none")])
    assert f"argument {option}: there is no file {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_taken_port(tmp_path, host):
    """It is said before a model is loaded."""
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        words = [str(tmp_path), "--host", host, "--port", str(port)]
        with pytest.raises(
            SystemExit, match=f"listen on {host} port {port}: Address already in use$"
        ):
            serve(make_parser().parse_args(words))
    with pytest.raises(SystemExit, match=r"cannot listen on no\.such\.host port 0: "):
        serve(make_parser().parse_args([str(tmp_path), "--host", "no.such.host", "--port", "0"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(SystemExit) as refused:
        serve(make_parser().parse_args([str(FOLDER), "--device", "cuda", "--port", "0"]))
    assert str(refused.value).startswith("flashcell serve: --device is cuda, but: ")
