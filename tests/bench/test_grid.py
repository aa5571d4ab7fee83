"""Tests scripts/bench_grid and scripts/tune without timing anything: rows, resuming, fits, tables."""

import csv
import importlib.machinery
import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.grid import draw, fit, measure
from flashcell.choice.cost_model import AMOUNTS, Call, amounts, groups, predict, read_table

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "cuda", "name": "GPU", "capability": 90, "units": 132, "source": "a test"}


def script(name: str):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch):
    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        script(name).main()

    return run


def made_up(call: Call, side: int) -> float:
    """Times in microseconds by costs that depend on the group."""
    costs = {"call": 50 + 100 * side, "step": 10 - 9 * side, "product": 20, "weight": 3}
    if groups(call, "cuda")[side].endswith("tf32"):
        costs = {name: 2 * cost for name, cost in costs.items()}
    return sum(costs.get(n, 0) * a for n, a in zip(AMOUNTS, amounts(call), strict=True))


def measured(count: int, noise: float = 0.0) -> list[fit.Measured]:
    chance = random.Random(1)
    found = []
    for one in draw.draw(7, count, "cuda"):
        call = fit.as_call(one, "cuda", 90)
        factor = lambda: chance.uniform(1 - noise, 1 + noise)
        found.append(fit.Measured(call, *(made_up(call, s) * factor() for s in (0, 1))))
    return found


def test_the_fit_finds_the_costs():
    those = measured(1600)
    sides = [fit.fit_side(those, "cuda", side) for side in (0, 1)]
    entry = {**ABOUT, "margin": 1.0, "torch": sides[0], "kernel": sides[1]}
    read_table(json.dumps({"format": 1, "devices": [entry]}).encode(), "a table")
    named = [groups(m.call, "cuda") for m in those]
    count = [Counter(names) for names in zip(*named, strict=True)]
    tested = [
        m
        for m, n in zip(those, named, strict=True)
        if min(count[0][n[0]], count[1][n[1]]) >= fit.ENOUGH
    ]
    assert len(tested) > 60
    for one in tested:
        found = predict(entry, one.call)
        assert found.torch_us == pytest.approx(one.torch_us + fit.CHOICE_US, rel=1e-2)
        assert found.kernel_us == pytest.approx(one.kernel_us, rel=1e-2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_call_by_its_name(device):
    for call in draw.draw(5, 50, device):
        assert draw.Call.parse(str(call)) == call
    for name in ("", "lstm B1 T2 H3 bf16", "lstm B1 T0 H3 bf16 training", "lstm T1 B1 H1 bf16 training",
                 "gru B1 T1 H1 fp64 training", "net B1 T1 H1 bf16 training",
                 "lstm-cell B1 T2 H3 bf16 training"):  # fmt: skip
        with pytest.raises(ValueError, match=r"of a cell 1.*a precision and a mode"):
            draw.Call.parse(name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--call", "lstm"], "--call 'lstm' must be a net"),
        (["--call", "lstm B1 T1 H1 fp32 training", "--append"], "--append and --folder must not"),
        (["--graph", "--device", "cpu"], "--graph needs --device cuda"),
        (["--graph", "--call", "gru B1 T9 H1 fp32 inference"], "--graph times inference of lstm"),
    ],
)
def test_calls_that_are_refused(run, capsys, arguments, said):
    with pytest.raises(SystemExit) as error:
        run("bench_grid", *arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_noise_is_not_fitted(monkeypatch):
    monkeypatch.setattr(fit, "CHOICE_US", 0.0)  # many of these calls are as short as a choice
    those = measured(900, noise=0.2)
    assert sum(m.ratio < 1 for m in those) > 30
    guesses = fit.held_out(those, ABOUT)
    result = fit.outcome((m, r < 1.0) for m, r in guesses)
    assert result.slower < 0.06
    assert result.mean > 0.97 * result.best
    margin = fit.best_margin(guesses)
    careful = fit.outcome((m, r < margin) for m, r in guesses)
    assert careful.slower <= result.slower


def test_nonnegative_least_squares():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        matrix = torch.rand(30, 6, generator=generator, dtype=torch.float64)
        want = torch.rand(6, generator=generator, dtype=torch.float64) - 0.4
        target = matrix @ want
        found = fit.nonnegative(matrix, target)
        assert (found >= 0).all()
        gradient = matrix.T @ (matrix @ found - target)
        assert (gradient > -1e-6).all()  # no entry should grow
        assert (gradient[found > 1e-9].abs() < 1e-6).all()


def test_sizes_of_the_nets():
    for net, (kind, options) in draw.NETS.items():
        call = draw.Call(net, 4, 1 if net in draw.CELLS else 7, 16, "exact", "training")
        found = fit.as_call(call, "cuda", 90)
        projection = {"proj_size": found.projection} if found.projection else {}
        module = getattr(torch.nn, kind)(16, 16, **options, **projection, bias=False)
        weights = sum(p.numel() for p in module.parameters())
        assert amounts(found)[tuple(AMOUNTS).index("weight")] * 1e6 == pytest.approx(weights)
        assert found.trains == 1
        assert found.packed == (net == "lstm-packed")


def times(ratio: float) -> measure.Times:
    return measure.Times(ratio, 2.0, 1.0, 0.1, 0.2, 0.1, ratio, 9, 0.0, "kernel")


def test_a_run_goes_on_where_it_stopped(run, tmp_path, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(
        measure, "measure", lambda call, device, states: (timed.append(call), times(2.0))[1]
    )
    threads = torch.get_num_threads()
    options = ("--device", "cpu", "--threads", threads, "--folder", tmp_path, "--commit", "abc")
    with pytest.raises(SystemExit, match="no call was timed"):
        run("bench_grid", *options, "--minutes", "0")
    run("bench_grid", *options, "--calls", "3")
    run("bench_grid", *options, "--calls", "5")
    assert timed == list(draw.draw(0, 5, "cpu"))
    assert "all                 5 calls, geometric mean  2.00, 100.0%" in capsys.readouterr().out
    run("bench_grid", *options, "--calls", "5", "--seed", "1")
    run("bench_grid", *options[:-1], "def", "--calls", "5")
    assert len(timed) == 15
    (path,) = tmp_path.glob("*-grid.csv")
    with path.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 15


@pytest.mark.parametrize("net", draw.NETS)
def test_calls_with_states_compute_the_same(net):
    """The states have the shapes that torch.nn asks for, in every net."""
    call = draw.Call(net, 2, 1 if net in draw.CELLS else 3, 8, "exact", "inference")
    modules, x = measure.make_modules(call, "cpu"), measure.make_input(call, "cpu")
    hx = measure.make_states(call, modules["torch"], "cpu")
    steps = (measure.make_step(modules[name], x, hx, call.mode) for name in ("torch", "auto"))
    torch.testing.assert_close(*(step() for step in steps))


def test_a_slow_call_fails_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda call, device, states: times(0.5))
    with pytest.raises(SystemExit, match=r"3 of 3 calls are below 0\.95"):
        run("bench_grid", "--device", "cpu", "--calls", "3", "--threads", torch.get_num_threads())


@pytest.fixture
def results(tmp_path):
    """A file as scripts/bench_grid writes it."""
    path = tmp_path / "grid.csv"
    calls = list(draw.draw(3, 120, "cuda"))
    stamp = {"device_type": "cuda", "device": "GPU", "capability": 90, "units": 132}
    with path.open("w", newline="") as file:
        columns = [*stamp, "torch", "commit", *draw.Call._fields, "torch_ms", "kernel_ms"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for call in calls:
            us = [made_up(fit.as_call(call, "cuda", 90), side) for side in (0, 1)]
            row = {**stamp, "torch": "2.11.0", "commit": "abc", **call._asdict()}
            writer.writerow(row | {"torch_ms": us[0] / 1e3, "kernel_ms": us[1] / 1e3})
    return path


def test_tune_writes_a_table(run, results, tmp_path, monkeypatch, capsys):
    path = tmp_path / "cache/flashcell/tuned.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHCELL_TUNED", raising=False)
    run("tune", "--from", results, "--check", results, "--dry-run")
    assert not path.exists()
    run("tune", "--from", results)
    (entry,) = read_table(path.read_bytes(), "tuned.json")
    assert entry["name"] == "GPU"
    assert "commit abc" in entry["source"]
    other = {**entry, "name": "another", "units": 7}
    path.write_text(json.dumps({"format": 1, "devices": [other, entry]}))
    run("tune", "--from", results)
    assert {e["name"] for e in read_table(path.read_bytes(), "")} == {"GPU", "another"}
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]
    assert "held-out calls" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("units", "shared"), [(132, True), (66, False)])
def test_tune_shares_the_calls_of_devices_that_are_alike(run, results, tmp_path, units, shared):
    other, path = tmp_path / "other.csv", tmp_path / "tuned.json"
    other.write_text(results.read_text().replace("GPU,90,132", f"another,90,{units}"))
    run("tune", "--from", results, other, "--output", path)
    for entry in read_table(path.read_bytes(), ""):
        assert ("120 calls and 120 of others like it" in entry["source"]) == shared


def test_tune_leaves_what_it_cannot_read(run, results, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text("{")
    with pytest.raises(SystemExit, match=r"tuned\.json is no JSON"):
        run("tune", "--from", results, "--output", path)
    assert path.read_text() == "{"
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match=r"other\.csv is no file of scripts/bench_grid"):
        run("tune", "--from", other, "--output", path)
    few = tmp_path / "few.csv"
    few.write_text("".join(results.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(SystemExit, match="at least 30 are needed"):
        run("tune", "--from", few, "--output", path)


def test_tune_measures(run, tmp_path, monkeypatch):
    def measured(call, device, names):
        us = [made_up(fit.as_call(call, "cpu", 512), side) for side in (0, 1)]
        timed.append(call)
        return times(us[0] / us[1])._replace(torch_ms=us[0] / 1e3, kernel_ms=us[1] / 1e3)

    timed, path = [], tmp_path / "tuned.json"
    monkeypatch.setattr(measure, "measure", measured)
    threads = torch.get_num_threads()
    options = ("--device", "cpu", "--threads", threads, "--output", path)
    with pytest.raises(SystemExit, match="at least 30 are needed"):
        run("tune", *options, "--minutes", "1e-9")
    assert not path.exists()
    run("tune", *options, "--minutes", "0.02")
    (entry,) = read_table(path.read_bytes(), "")
    assert (entry["device"], entry["units"]) == ("cpu", threads)
