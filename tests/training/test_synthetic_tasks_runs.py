"""Tests scripts/tasks: runs end when they should, and the table fills."""

import csv
import dataclasses
import sys
from functools import partial

import numpy as np
import pytest
import torch

from cases import DEVICE
from commands import load_command
from synthetic_tasks.data import TASKS, Task, keep_nth
from synthetic_tasks.results import NAMES, append, read, summary, table
from synthetic_tasks.training import Feed, RowAdamW, Run, Trainer, rate_factor

EASY = Task(
    partial(keep_nth, V=3, n=1), 3, (2, 4), (2, 4), None, 256, full_block=False, steps=150,
    batch=32, learning_rates=(3e-3,), warmup=0.1,
)  # fmt: skip


def test_rows_of_adamw_are_adamw():
    values = torch.randn(3, 5, dtype=torch.float64)
    ours = values.clone().requires_grad_()
    theirs = [row.clone().requires_grad_() for row in values]
    rates = [1e-1, 1e-2, 1e-3]
    optimizer = RowAdamW(ours, rates, 0.1)
    each = [
        torch.optim.AdamW([row], lr=rate, weight_decay=0.1)
        for row, rate in zip(theirs, rates, strict=True)
    ]
    for step in range(5):
        ours.square().sin().sum().backward()
        optimizer.step(0.5 if step == 3 else 1.0)
        for row, rate, own in zip(theirs, rates, each, strict=True):
            own.param_groups[0]["lr"] = rate * (0.5 if step == 3 else 1.0)
            own.zero_grad()
            row.square().sin().sum().backward()
            own.step()
    torch.testing.assert_close(ours.detach(), torch.stack(theirs).detach(), atol=1e-14, rtol=0)
    kept = optimizer.keep([2, 0])
    assert (kept == ours[[2, 0]]).all()
    assert optimizer.rates.flatten().tolist() == [1e-3, 1e-1]


def test_schedule():
    task = dataclasses.replace(EASY, steps=100, warmup=0.1, last_rate=0.1)
    assert [rate_factor(task, step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert rate_factor(task, 55) == pytest.approx(0.55)
    assert rate_factor(task, 100) == pytest.approx(0.1)


def finish(trainer: Trainer, solved: float) -> list[Run]:
    for _ in trainer.train(solved):
        pass
    return trainer.runs


def test_trainers_side_by_side_do_what_each_does_alone():
    def make(rate: float) -> Trainer:
        task = dataclasses.replace(EASY, steps=20)
        return Trainer(task, "gru", [Run(0, rate), Run(1, rate)], DEVICE, "reference", 8)

    alone = [finish(make(rate), 1.1) for rate in (3e-3, 1e-3)]
    together = [make(rate) for rate in (3e-3, 1e-3)]
    for _ in zip(*(trainer.train(1.1) for trainer in together), strict=True):
        pass
    assert [trainer.runs for trainer in together] == alone
    assert alone[0] != alone[1]


def test_a_step_reads_its_own_batch_and_rate():
    """Buffers that are filled for several steps at once give what the task gives step by step."""
    task = dataclasses.replace(EASY, training_rows=48, batch=16, steps=20)
    runs = [Run(5, 1e-3), Run(2, 1e-3), Run(5, 1e-2)]
    feed, kept = Feed(task, runs, 4, DEVICE), {}
    for first, count in ((0, 4), (4, 2)):
        feed.fill(first, count)
        for step in range(first, first + count):
            tokens, targets, factor = feed.take()
            assert factor.item() == pytest.approx(rate_factor(task, step))
            for run, x, y in zip(runs, tokens, targets, strict=True):
                want = task.training_batch(run.seed, step, kept)
                assert (x.cpu().numpy() == want[0]).all()
                assert (y.cpu().numpy() == want[1]).all()


def test_it_learns_and_stops_when_every_seed_has():
    """Of two learning rates the one that achieves nothing is stopped when the other succeeds."""
    runs = [Run(seed, rate) for rate in (3e-3, 1e-9) for seed in range(2)]
    trained = finish(Trainer(EASY, "rnn", runs, DEVICE, "reference", 10), 0.999)
    assert [run.status for run in trained] == ["solved", "solved", "stopped", "stopped"]
    assert all(run.accuracy > 0.99 for run in trained[:2])
    assert all(run.accuracy < 0.7 for run in trained[2:])
    assert all(run.step < EASY.steps for run in trained)


def test_to_the_end_it_goes_on_when_solved():
    task = dataclasses.replace(EASY, steps=80)
    runs = [Run(0, 3e-3), Run(0, 1e-9)]
    trainer = Trainer(task, "rnn", runs, DEVICE, "reference", 10, 512, to_the_end=True)
    assert len(trainer.validation[0]) == 512
    solved, idle = finish(trainer, 0.9)
    assert (solved.status, idle.status) == ("solved", "limit")
    assert solved.step == idle.step == 80
    assert solved.good > 2


def test_time_ends_a_run_at_its_next_check():
    trainer = Trainer(EASY, "gru", [Run(0, 1e-3)], DEVICE, "reference", 4)
    for _ in trainer.train(1.1, seconds=0.0):
        pass
    (run,) = trainer.runs
    assert (run.status, run.step) == ("limit", 4)
    assert run.accuracy > 0


def test_a_run_that_diverges_ends_alone():
    runs = [Run(0, 1e38), Run(0, 3e-3)]
    task = dataclasses.replace(EASY, steps=30)
    broken, sound = finish(Trainer(task, "lstm", runs, DEVICE, "reference", 10), 1.1)
    assert (broken.status, sound.status) == ("diverged", "limit")
    assert broken.step < sound.step == 30
    assert np.isnan(broken.accuracy)
    assert sound.accuracy > 0.3


@pytest.fixture
def command():
    return load_command("tasks")


def test_the_table_fills_over_several_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "parity", dataclasses.replace(EASY, steps=4))
    results = tmp_path / "tasks.csv"

    def run(*more: str) -> list[dict]:
        line = ["tasks", "--task", "parity", "--model", "gru", "--results", str(results)]
        options = ["--device", DEVICE, "--backend", "reference", "--check-every", "2"]
        monkeypatch.setattr(sys, "argv", [*line, *options, *more])
        for _ in command.run(command.parse_arguments(), "parity", "gru"):
            pass
        return read(results)

    first = run("--seeds", "1", "--rates", "1e-3", "1e-9")
    assert [(r["seed"], r["learning_rate"]) for r in first] == [("0", "0.001"), ("0", "1e-09")]
    assert {r["status"] for r in first} <= {"limit", "solved", "stopped"}
    more = run("--seeds", "2", "--rates", "0.001")
    assert more[:2] == first
    assert [(r["seed"], r["learning_rate"]) for r in more[2:]] == [("1", "0.001")]
    assert run("--seeds", "2", "--rates", "0.001", "1e-9")[:3] == more
    assert "parity, gru: 1 of 4 runs to do" in capsys.readouterr().out
    assert len(run("--seeds", "2", "--rates", "0.001", "1e-9")) == 4
    with pytest.raises(SystemExit, match="--model is mamba, but must be one of rnn, gru"):
        command.chosen("model", ["mamba"], NAMES)


def test_the_table_shows_the_best_learning_rate(tmp_path):
    path = tmp_path / "tasks.csv"
    fixed = {
        "task": "parity-extrapolation", "model": "lstm", "parameters": 21120, "batch": 256,
        "loss": 0.0, "device": "a machine", "torch": "2", "commit": "c", "date": "2026-01-01",
    }  # fmt: skip
    runs = [  # steps, rate, status, step, accuracy of two seeds
        (100, "0.1", "solved", 10, (1.0, 1.0)),  # a shorter protocol
        (900, "0.1", "diverged", 10, ("nan", "nan")),
        (900, "0.01", "solved", 300, (1.0, 0.98)),
        (900, "0.001", "stopped", 300, (1.0, 1.0)),  # not run to its end
    ]
    for steps, rate, status, step, accuracy in runs:
        for seed, value in enumerate(accuracy):
            row = {**fixed, "steps": steps, "learning_rate": rate, "status": status, "step": step}
            append([{**row, "seed": seed, "accuracy": value}], path)
    partly = {**fixed, "steps": 900, "learning_rate": "0.02", "step": 100, "accuracy": 1.0}
    append([{**partly, "seed": n, "status": s} for n, s in enumerate(("solved", "stopped"))], path)
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == 10
    ((name, found),) = summary(read(path)).items()
    assert name == ("parity-extrapolation", "lstm")
    assert {row["learning_rate"] for row in found} == {"0.01"}
    assert "| parity-extrapolation | LSTM | 21,120 | 0.9900 | 1.00 | 2, 2 | 0.01 | 300 steps |" in (
        table(path)
    )
