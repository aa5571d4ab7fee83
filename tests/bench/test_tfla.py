"""Tests bench_ops --suite tfla: cases, floors, marks, and what plot_bench makes of the rows."""

import csv
import sys
from dataclasses import replace

import pytest
import torch

from flashcell.kernels import tfla as reference


@pytest.fixture
def modules():
    """The modules of this kernel's cases and of what runs them."""
    from bench.ops import tfla
    from bench.suites.tfla import cases_cuda

    return cases_cuda, tfla


def test_cases_and_floors(modules):
    """Case names are unique, because two cases of one name would hide each other's rows; the floors
    have the values worked out by hand."""
    suite, _ = modules
    names = [case.name for case in suite.CASES]
    assert len(set(names)) == len(names)
    floors = [
        suite.floor_ms(suite.MUST[k], which) for k in (0, 2) for which in ("forward", "train")
    ]
    floors += [suite.floor_ms(case, "step") for case in suite.STEPS]
    assert floors == pytest.approx([0.375, 1.00, 0.381, 1.33, 0.00195, 0.0156, 0.125], rel=0.005)
    assert {case.chunk for case in suite.CHUNKS} == {64 << k for k in range(7)}
    assert [(c.key, c.batch, c.steps) for c in suite.HEADS] == [
        (32 << k, 4, 8192) for k in range(6)
    ]


def test_what_misses_its_mark_is_said(modules, monkeypatch):
    suite, bench = modules
    case = suite.MUST[0]
    took = {"forward": 1.1, "train": 4.0}

    def measure(case, *_):
        row = {"provider": "ours", "peak_mib": "2400"}
        return [
            row | {"pass": which, "p50_ms": str(ms), "limit_ms": case.limit(which)}
            for which, ms in took.items()
        ]

    monkeypatch.setattr(bench, "measure", measure)
    takes = lambda other: other in (case, suite.MUST[2])
    saved = []
    problems = bench.run_suite(takes, None, [], {}, 0.1, saved.append).splitlines()
    assert problems[1:] == [
        f"{case.name} train: 4.0 > 3.9 ms",
        f"{case.name}: 2.52 > 2.4 GB",
    ]
    assert len(saved) == 2
    assert bench.uneven(
        {8192: {"forward": 1.0}, 512: {"forward": 1.31}, 64: {"forward": 1.29}}
    ) == ["T 512 forward: 1.31 ms, more than 1.3 of 1"]


def test_a_peer_that_cannot_run_says_why(modules, monkeypatch, tmp_path, capsys):
    """Each pass has a row with a time or a note, even if the file had rows of other suites before."""
    from bench.timing import Sample
    from measurement.record import append

    suite, bench = modules
    took = Sample(1.0, 1.0, 1.0, 7, 0.1, 100.0)
    outcomes = {
        "ours": {"forward": took, "train": took},
        "mlstm_kernels": {"forward": took, "train": took},
        "simple_gla": {"forward": took, "train": "out of resource: shared memory"},
    }

    def run_provider(case, name, *_):
        if name not in outcomes:
            raise suite.Unavailable(f"{name} is not installed\nat all")
        return outcomes[name], {}

    monkeypatch.setattr(bench, "run_provider", run_provider)
    monkeypatch.setattr(suite, "draw", lambda case: {})
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    peers = ("mlstm_kernels", "simple_gla", "mamba2")
    rows = bench.measure(suite.MUST[0], None, peers, 0.1)
    notes = {(row["provider"], row["pass"]): row["note"] for row in rows}
    assert notes == {
        ("ours", "forward"): "",
        ("ours", "train"): "",
        ("mlstm_kernels", "forward"): bench.EAGER,
        ("mlstm_kernels", "train"): bench.EAGER,
        ("simple_gla", "forward"): "",
        ("simple_gla", "train"): "out of resource: shared memory",
        ("mamba2", "forward"): "mamba2 is not installed",
        ("mamba2", "train"): "mamba2 is not installed",
    }
    assert [row["p50_ms"] for row in rows] == ["1"] * 5 + [""] * 3
    assert capsys.readouterr().out.count("mamba2 is not installed") == 2
    backwards = dict(reversed((rows[0] | {"device": "G", "date": "d"}).items()))
    append([backwards], tmp_path)
    path = append([{"device": "G", **row} for row in rows], tmp_path)
    with path.open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [row["note"] for row in kept[1:]] == list(notes.values())
    assert {row["date"] for row in kept} == {"d", ""}
    outcomes["ours"] = outcomes["simple_gla"]
    with pytest.raises(RuntimeError, match="train: out of resource"):
        bench.measure(suite.MUST[0], None, peers, 0.1)


def test_mamba2_is_made_without_its_package(modules, monkeypatch, tmp_path):
    """The import fails in every case, not in the first alone."""
    suite, _ = modules
    files = {
        "__init__.py": "raise ImportError('its CUDA extension')\n",
        "ops/__init__.py": "",
        "ops/triton/__init__.py": "",
        "ops/triton/ssd_combined.py": "def mamba_chunk_scan_combined(*_, **__):\n    return 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "mamba_ssm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    p = suite.draw(replace(suite.MUST[0], batch=1, steps=8), "cpu")
    for case in suite.MUST[:2]:
        provider = suite.make(case, "mamba2", None)
        assert provider.call(provider.native(p)) == 1
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        sys.modules.pop(name)


COMMON = {"op": "mlstm", "dtype": "bfloat16", "B": 8, "T": 8192, "N": 16, "D": 256, "ratio": 1}
COMMON |= {"device": "NVIDIA H200", "driver": "1", "torch": "2", "commit": "c", "date": "d"}
COMMON |= {"kernel": "_tfla_cuda_0", "tflops": 100, "gbps": 1000}


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(COMMON | row for row in rows)


def row(case, provider, which, ms, form="must", floor=0.375, limit=""):
    own = {"case": case, "provider": provider, "pass": which, "p50_ms": ms, "form": form}
    return COMMON | own | {"floor_ms": floor, "limit_ms": limit, "peak_mib": 1000}


def test_table_of_marks(plot, tmp_path):
    big, step = "mlstm-exp-16x128x256-B8T8192", "mlstm-exp-8x256x512-B1T1"
    rows = [
        row(big, "ours", "forward", 0.75, limit=1.3),
        row(big, "simple_gla", "forward", 1.5),
        row(big, "mlstm_kernels", "forward", 3.0),
        row(step, "ours", "step", 0.005, floor=0.00195, limit=0.004),
        row(f"{big}-chunk64", "ours", "forward", 9, form="chunks"),
        row(big, "gla", "forward", "") | {"note": "does not fit"},
        row(big, "gla-limit", "forward", 4) | {"note": "eager"},
    ]
    write(tmp_path / "gpu.csv", [{"note": ""} | row for row in rows])
    table, _ = plot.TABLES["tfla-marks"]
    lines = table(tmp_path / "gpu.csv").splitlines()[4:]
    assert lines == [
        "| exp, 16 heads 128/256, B 8, T 8192 | forward | 0.375 ms | 0.75 ms | 50% | 1.3 ms "
        "| 1.05 GB | simple_gla 1.5 ms, mlstm_kernels 3 ms, gla-limit 4 ms\\* |",
        "| exp, 8 heads 256/512, B 1 | a step | 1.95 us | 5 us | 39% | **4 us** |  |  |",
        "",
        "- \\* gla-limit: eager",
        "- gla, forward: not timed in exp 16x128x256 B8T8192: does not fit",
    ]
    assert "gla" not in plot.read_providers(tmp_path / "gpu.csv", "tfla")[big]["gla"]


def test_tables_of_sweeps(plot, tmp_path):
    big = "mlstm-exp-16x128x256-B8T8192"
    rows = [
        row(f"{big}-chunk64", "ours", "forward", 0.97, form="chunks"),
        row(f"{big}-chunk64", "ours", "train", 3.9, form="chunks"),
        row(f"{big}-chunk64", "mlstm_kernels", "forward", 3.4, form="chunks"),
        row(f"{big}-chunk256", "ours", "forward", 0.9, form="chunks"),
        row("mlstm-exp-64x64x64-B4T8192", "ours", "forward", 0.5, form="heads"),
        row(big, "ours", "forward", 0.75, limit=1.3),
    ]
    write(tmp_path / "gpu.csv", rows)
    lines = lambda name: plot.TABLES[name][0](tmp_path / "gpu.csv").splitlines()[2:]
    assert lines("tfla-chunks") == [
        "| | 64 | 256 |",
        "|---|---|---|",
        "| exp 16x128x256: ours | 0.97 / 3.9 | 0.9 / – |",
        "| exp 16x128x256: mlstm_kernels | 3.4 / – |  |",
    ]
    assert lines("tfla-heads") == ["| | 64x64x64 |", "|---|---|", "| ours | 0.5 / – |"]


def test_figures(plot, tmp_path):
    pytest.importorskip("matplotlib")
    from report.plots_tfla import draw_tfla

    rows = [
        row(f"mlstm-exp-16x128x256-B8T8192-chunk{L}", provider, which, 1 + L, form="chunks")
        for L in (64, 256)
        for provider in ("ours", "mlstm_kernels")
        for which in ("forward", "train")
    ]
    rows += [row("mlstm-exp-16x128x256-B8T8192", "ours", "forward", 1, limit=2)]
    path = tmp_path / "gpu.csv"
    write(path, rows)
    draw_tfla(path, plot.read_providers(path, "tfla"))
    assert {p.name for p in tmp_path.glob("*.svg")} == {
        "gpu-tfla-chunks.svg",
        "gpu-tfla-roofline.svg",
    }


@pytest.mark.parametrize("steps", [1, 70])
def test_cases_of_the_cpu(steps):
    """A step works in place: its second call continues from the first call's state."""
    from bench.suites import cases_of

    cases = cases_of("tfla")
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    case = replace(cases.CASES[-1 if steps == 1 else 0], steps=steps, heads=2, key=16, width=24)
    p = cases.parameters(case)
    ours = cases.Ours(case, p, reference)
    with torch.no_grad():
        h, again = ours(), ours()
    assert h.shape == (case.batch, steps, 2, 24)
    assert torch.equal(again, h) == (steps > 1)
    gflop, floor = cases.work(case, cases.passes(case)[0], lambda: 100.0, lambda size: 10.0)
    assert gflop > 0
    assert floor > 0
