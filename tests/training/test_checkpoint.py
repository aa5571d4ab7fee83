"""Tests checkpoints without a whole run: two are kept, damage is named, and no code is read from
them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from commands import environment
from flashcell import FlashRNNConfig, FlashRNNForCausalLM
from training.checkpoint import Checkpoints, checkpoints_in, read_state
from training.manifest import describe, find_damage, write_manifest

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_heads": 1}


class Run:
    """A model in training, whose checkpoints are in `folder`."""

    def __init__(self, folder: Path):
        torch.manual_seed(0)
        config = FlashRNNConfig(vocab_size=16, backend="reference", **SIZES)
        model = FlashRNNForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        self.parts = accelerator.prepare(model, optimizer, schedule)
        self.checkpoints = Checkpoints(folder, accelerator, *self.parts)
        self.progress = {"step": 0, "carried": [None], "texts": {"rows": [np.arange(3)]}}

    def step(self) -> list[float]:
        """Uses everything that a step depends on, and returns what it makes."""
        model, optimizer, schedule = self.parts
        ids, (carried,) = torch.randint(16, (2, 5)), self.progress["carried"]
        output = model(ids, past_key_values=carried, use_cache=True)
        output.logits.square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step = self.progress["step"] + 1
        self.progress |= {"step": step, "carried": [output.past_key_values]}
        return [output.logits.sum().item(), random.random(), *schedule.get_last_lr()]

    def save(self) -> Path:
        self.checkpoints.save(self.progress)
        return checkpoints_in(self.checkpoints.folder)[0]

    def load(self) -> list[str]:
        self.progress, damaged = self.checkpoints.load()
        return damaged


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    run = Run(tmp_path)
    run.step(), run.step(), run.save()
    want = [run.step() for _ in range(3)]
    again = Run(tmp_path)
    again.step()  # nothing of this step may remain
    assert again.load() == []
    assert (again.progress["texts"]["rows"][0] == np.arange(3)).all()
    assert isinstance(again.progress["texts"]["rows"][0], np.ndarray)
    assert [again.step() for _ in range(3)] == want


def test_two_are_kept_and_the_one_before_is_taken(tmp_path):
    run = Run(tmp_path)
    for _ in range(4):
        run.step(), run.save()
    newest, before = checkpoints_in(tmp_path)
    assert [newest.name, before.name] == ["step-00000004", "step-00000003"]
    assert sorted(p.name for p in newest.iterdir()) == ["manifest.json", "process-0.pt"]
    # Another checkpoint's file.
    (newest / "process-0.pt").write_bytes((before / "process-0.pt").read_bytes())
    again = Run(tmp_path)
    (damaged,) = again.load()
    assert damaged.startswith(f"{newest} is damaged: process-0.pt: ")
    assert again.progress["step"] == 3
    again.step()
    assert again.save() == newest, "the damaged one is replaced"
    assert find_damage(newest) is None
    assert checkpoints_in(tmp_path) == [newest, before]


def test_any_flipped_bit_is_found(tmp_path):
    run, draw = Run(tmp_path), random.Random(0)
    run.step()
    checkpoint = run.save()
    for path in checkpoint.iterdir():
        good = path.read_bytes()
        for _ in range(200):
            bad = bytearray(good)
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            assert find_damage(checkpoint, ["process-0.pt"]), "none is found"
        path.write_bytes(good)
    assert find_damage(checkpoint, ["process-0.pt"]) is None


def test_no_code_is_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made by a pickle"),)

    run = Run(tmp_path / "run")
    checkpoint = run.save()
    path = checkpoint / "process-0.pt"
    for evil in (Evil(), {**read_state(path), "random": Evil()}):
        torch.save(evil, path)
        write_manifest(checkpoint, {path.name: describe(path)})  # so that the digest is right
        with pytest.raises(ValueError, match=r"process-0\.pt is no checkpoint of this run.*plain"):
            run.load()
    assert not (tmp_path / "made by a pickle").exists()
    with pytest.raises(TypeError, match=r"a checkpoint cannot hold .*Evil"):
        run.checkpoints.save({**run.progress, "texts": Evil()})


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.step()
    checkpoint = run.save()
    run.step()
    monkeypatch.setattr(os, "rename", raise_full)
    with pytest.raises(OSError, match="No space left"):
        run.save()
    assert list(tmp_path.iterdir()) == [checkpoint]
    assert find_damage(checkpoint) is None


def raise_full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["run/identity.json", "run/log.csv", ".run.lock"])
def test_a_pipe_in_a_file_s_place_is_refused(tmp_path, name):
    """Opening one would wait for ever."""
    (tmp_path / "run/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "run/identity.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    work = (
        "from pathlib import Path; from training import run_folder\n"
        f"folder = Path({str(tmp_path / 'run')!r})\n"
        "lock, _ = run_folder.open_run(folder, {}, True, False)\n"
        "run_folder.Log(folder / 'log.csv', 1)"
    )
    command = [sys.executable, "-c", work]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert f"{name.rpartition('/')[2]} is no regular file" in ran.stderr
