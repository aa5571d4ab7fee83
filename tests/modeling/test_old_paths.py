"""Tests import paths from before the package had folders: one module under both names, loaded on
use."""

import importlib
import pickle
import subprocess
import sys
from unittest import mock

import pytest

import flashcell
from flashcell.utils.old_paths import FOLDERS, MOVED


@pytest.mark.parametrize("old", MOVED)
def test_one_module_under_both_names(old):
    module = importlib.import_module(f"flashcell.{old}")
    new = importlib.import_module(f"flashcell.{MOVED[old]}")
    assert module is new is getattr(flashcell, old)
    assert module.__name__ == module.__spec__.name == f"flashcell.{MOVED[old]}"
    assert importlib.import_module(f"flashcell.{MOVED[old]}").__spec__.loader is not None


def test_the_folders_answer_for_their_old_modules():
    from flashcell.generation import RecurrentGeneration, mixin
    from flashcell.layers import RecurrentMixer, recurrent_mixer, rnn

    assert RecurrentGeneration is mixin.RecurrentGeneration
    assert RecurrentMixer is recurrent_mixer.RecurrentMixer
    assert rnn.LSTM is flashcell.LSTM
    for folder, module in FOLDERS.items():
        with pytest.raises(
            AttributeError, match=f"module 'flashcell.{module}' has no attribute 'a'"
        ):
            getattr(getattr(flashcell, folder), "a")  # noqa: B009
        with pytest.raises(ImportError, match="nothing"):
            exec(f"from flashcell.{folder} import nothing")


def test_pickles_by_old_names():
    for old, name, kind in (
        ("rnn", "LSTM", flashcell.LSTM),
        ("flash_rnn_layers", "FlashGRU", flashcell.FlashGRU),
        ("layers", "RecurrentMixer", flashcell.layers.RecurrentMixer),
    ):
        assert pickle.loads(f"cflashcell.{old}\n{name}\n.".encode()) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernel_loader.load_kernel", "hub.kernel_loader"),
        ("generation.device_of_tokens", "generation.mixin"),
        ("layers.RecurrentMixer", "layers.recurrent_mixer"),
    ],
)
def test_patches_by_old_names(old, new):
    module, name = importlib.import_module(f"flashcell.{new}"), old.rpartition(".")[2]
    before = vars(module)[name]
    with mock.patch(f"flashcell.{old}") as put:
        with mock.patch(f"flashcell.{old}"):
            assert vars(module)[name] is not put
        assert vars(module)[name] is put
    assert vars(module)[name] is before
    with pytest.MonkeyPatch.context() as patch:
        for value in (3, 4):
            patch.setattr(f"flashcell.{old}", value)
            assert vars(module)[name] == value
    assert vars(module)[name] is before


def test_old_names_load_nothing_before_they_are_asked_for():
    code = """
import contextlib, sys, flashcell
assert "flashcell.state.context_parallel" not in sys.modules
for name in ("nothing", "Kernel_loader", "hub.nothing", "kernel_loader.nothing"):
    with contextlib.suppress(ImportError):
        __import__(f"flashcell.{name}")
        raise AssertionError(name)
assert not hasattr(flashcell, "nothing")
assert "flashcell.state.context_parallel" not in sys.modules
assert flashcell.context_parallel is sys.modules["flashcell.state.context_parallel"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
