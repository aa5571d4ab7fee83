"""Tests bench_ops --device cuda without a GPU: cases, gate, limits, rows, tables, ncu's log."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashcell.kernels import fused_rnn as reference

ROOT = Path(__file__).resolve().parents[2]
STAMP = {
    "device": "NVIDIA H200",
    "driver": "1",
    "torch": "2",
    "commit": "c",
    "date": "2026-01-01",
    "kernel": "_fused_rnn_cuda_0",
}


@pytest.fixture
def bench():
    """The modules of bench_ops; restores torch's switches afterwards."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [place.fp32_precision for place in places]
    from bench import timing
    from bench.ops import cuda, roofline
    from bench.suites.fused_rnn import cases_cuda, floor_cuda
    from measurement import record

    yield SimpleNamespace(
        common=record, cuda=cuda, roofline=roofline, cases=cases_cuda,
        floor=floor_cuda, Sample=timing.Sample,
    )  # fmt: skip
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    command = (sys.executable, str(ROOT / "scripts/bench_ops"), "--device", "cuda", *arguments)
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_every_form_runs_dry():
    names = ("lstm-12x64", "lstm-1x768-linear", "*-b1-step", "*-b1-linear-step", "*-packed")
    done = run_tool("--dry-run", "--case", *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  ours") == 5
    assert done.stdout.count("  cudnn-bf16") == 3
    assert "NOT TIMED" not in done.stdout


def test_a_name_that_fits_nothing_lists_the_cases():
    done = run_tool("--dry-run", "--case", "nothing*")
    assert done.returncode == 2
    assert "lstm-12x64-b32" in done.stderr


def test_must_has_every_row_of_the_table(bench):
    cases = bench.cases.select(["must"], ["*"])
    limited = [case for case in cases if case.limits != (None, None)]
    assert len(limited) == 22
    assert all(case.limits[1] for case in limited if case.form != "step")
    every = bench.cases.select(["must", "flashrnn"], ["*"])
    both = next(case for case in every if case.name == "lstm-12x64-b32")
    assert both.limits == (0.4, 1.0)
    assert both.peers == ("flashrnn", "sdpa")


def fake_bench(bench, monkeypatch, milliseconds):
    """A benchmark on the CPU in which everything takes a fixed time; cases are reduced to run
    there."""
    sample = bench.Sample(milliseconds, milliseconds, milliseconds, 7, 0.1, 1.0)

    def time_calls(call, *_):
        call(0)
        return sample

    monkeypatch.setattr(bench.cuda, "time_calls", time_calls)
    return bench.cuda.Bench(reference, "cpu")


def tiny(bench, **changes):
    sizes = {"batch": 2, "steps": 4, "heads": 2, "width": 16}
    return bench.cases.Case(**{"name": "lstm-2x16", "cell": "lstm", **sizes, **changes})


def test_rows_limits_and_table(bench, plot, monkeypatch, tmp_path, capsys):
    runner = fake_bench(bench, monkeypatch, 0.5)
    case = tiny(bench, peers=("loop", "sdpa"), limits=(0.4, 1.0))
    rows = []
    problem = bench.cuda.run_cases([case], ["loop", "sdpa"], runner, STAMP, rows.extend)
    assert [(row["provider"], row["pass"]) for row in rows] == [
        (provider, which)
        for provider in ("ours", "loop", "sdpa")
        for which in bench.cases.passes(case)
    ]
    assert problem.splitlines()[1:] == ["lstm-2x16 forward: 0.5 > 0.4 ms"]
    assert "forward <= 0.4 MISSED  train <= 1 holds" in capsys.readouterr().out
    ours = rows[1]
    assert float(ours["us_step"]) == 125
    assert 0 < float(ours["error_h"]) < 3.5e-3
    path = bench.common.append(rows, tmp_path)
    assert path.name == "nvidia-h200.csv"
    assert len(bench.common.append(rows, tmp_path).read_text().splitlines()) == 1 + 2 * len(rows)
    assert "| lstm | 2, 4, 2 x 16 | bf16 | 0.5 ms" in plot.cuda_table(path)
    assert "| **0.4** | loop 1.00x |" in plot.cuda_table(path)


def test_a_peer_that_cannot_run_says_why(bench, plot, monkeypatch, tmp_path):
    runner = fake_bench(bench, monkeypatch, 0.5)
    monkeypatch.setitem(sys.modules, "flashrnn", None)
    case = tiny(bench, peers=("flashrnn", "loop"), limits=(1.0, 1.0))
    rows = []
    assert not bench.cuda.run_cases([case], ["flashrnn", "loop"], runner, STAMP, rows.extend)
    (why,) = {row["note"] for row in rows if row["provider"] == "flashrnn"}
    assert why.startswith("flashrnn cannot be imported")
    assert [row["p50_ms"] for row in rows] == ["0.5"] * 3 + [""] * 3 + ["0.5"] * 3
    assert "loop 1.00x" in plot.cuda_table(bench.common.append(rows, tmp_path))


def test_a_wrong_kernel_is_not_timed(bench, monkeypatch, capsys):
    def recurrent(cell, x, weight, bias, **options):
        h, state = reference.recurrent(cell, x, weight, bias, **options)
        return h * 1.02, state

    runner = fake_bench(bench, monkeypatch, 0.5)
    runner.kernel, runner.backend = SimpleNamespace(recurrent=recurrent), "auto"
    rows = []
    problem = bench.cuda.run_cases([tiny(bench)], [], runner, STAMP, rows.extend)
    assert rows == []
    assert "of h, 0.02" in problem
    assert "NOT TIMED" in capsys.readouterr().out


def test_a_wrong_gradient_is_not_timed(bench, monkeypatch):
    """h is right to the last bit, and a gradient is not."""

    class Scaled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, dx: 1.02 * dx)

    def recurrent(cell, x, weight, bias, **options):
        return reference.recurrent(cell, Scaled.apply(x), weight, bias, **options)

    runner = fake_bench(bench, monkeypatch, 0.5)
    runner.kernel, runner.backend = SimpleNamespace(recurrent=recurrent), "auto"
    rows = []
    problem = bench.cuda.run_cases([tiny(bench)], [], runner, STAMP, rows.extend)
    assert rows == []
    assert "0.02 of gradients" in problem


class OneCase:
    """A suite for the CPU's bench: its call returns what `h` says, torch's 1."""

    def __init__(self, h: float):
        self.case = SimpleNamespace(
            name="one", cell="lstm", batch=1, steps=1, heads=1, width=4, dtype="float32",
            peers=("torch",), required=0.9,
        )  # fmt: skip
        self.CASES, self.h = [self.case], h

    parameters = staticmethod(lambda case: {"dh": torch.ones(4)})
    passes = staticmethod(lambda case: ("forward",))
    has_torch_peer = staticmethod(lambda case: True)
    work = staticmethod(lambda *_: (1.0, 1.0))
    peer_of = staticmethod(lambda *_: lambda: torch.ones(4))

    def Ours(self, *_):
        return lambda: self.h * torch.ones(4)


@pytest.mark.parametrize("h", [math.nan, math.inf, 1.02])
def test_a_wrong_result_on_the_cpu_is_not_timed(h):
    from bench.ops import cpu

    suite = OneCase(h)
    with pytest.raises(SystemExit, match="a wrong result is not timed"):
        cpu.measure(suite, suite.case, "forward", None, 0.0)


@pytest.mark.parametrize(("ours", "missed"), [(1.0, False), (1.2, True)])
def test_a_slow_side_on_the_cpu_is_said(monkeypatch, capsys, ours, missed):
    from bench.ops import cpu

    monkeypatch.setattr(cpu, "alternate", lambda *_: ([ours] * 5, [1.0] * 5))
    suite = OneCase(1.0)
    stamp = dict.fromkeys(("device", "torch", "commit", "kernel"), "x")
    args = SimpleNamespace(threads=1, seconds=1.0)
    _, problem = cpu.run_cases(args, suite, None, stamp, ["one"])
    assert problem == ("below the required ratio: one forward" if missed else "")
    assert ("MISSED" in capsys.readouterr().out) == missed


def test_floors_grow_with_the_problem(bench):
    def floor(heads, width, batch):
        return bench.floor.step_seconds(
            bench.floor.Recurrence(4, heads, width, batch, 1, "bfloat16")
        )

    chain = [floor(24, 32, 16), floor(12, 64, 16), floor(6, 128, 16), floor(3, 256, 16)]
    chain += [floor(1, 768, b) for b in (16, 64, 128)] + [floor(1, 2048, 16)]
    assert chain == sorted(chain)
    assert 0.1e-6 < chain[0] < 0.15e-6
    assert 1.7e-6 < chain[-1] < 1.9e-6


def test_ncu_log(bench):
    metrics = {"dram__bytes.sum": "1,000", "lts__t_bytes.sum": "4000", "tensor.avg": "25",
               "sm__cycles_elapsed.avg": "100", "gpu__time_duration.sum": "2,000"}  # fmt: skip
    line = lambda cells: ",".join(f'"{cell}"' for cell in cells) + "\n"
    text = "==PROF== noise\n" + line(["ID", "Kernel Name", *metrics]) + line(["", "", *"u" * 5])
    phases = list(bench.roofline.phases())
    for _ in phases:
        text += line(["0", "sequential", *metrics.values()]) * 2
        text += line(["1", "spin_kernel(long)", *metrics.values()])
    found = bench.roofline.read_log(text, "tensor")
    assert len(found) == len(phases)
    rows = bench.roofline.make_rows(found, STAMP)
    assert {row["kernels"] for row in rows} == {2}
    assert {row["us"] for row in rows} == {"4"}
    assert {row["tensor_share"] for row in rows} == {"0.25"}


ZEN_3 = "sse2 fma f16c bmi1 bmi2 avx2"
ZEN_5 = f"{ZEN_3} avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16"
OLD = "sse2 sse4_2 avx"


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "asked", "expected"),
    [
        ("AuthenticAMD", 25, 1, ZEN_3, None, "Some CPU (Zen 3, AVX2)"),
        ("AuthenticAMD", 25, 17, ZEN_5, None, "Some CPU (Zen 4, AVX512-BF16)"),
        ("AuthenticAMD", 26, 2, ZEN_5, None, "Some CPU (Zen 5, AVX512-BF16)"),
        ("AuthenticAMD", 26, 2, ZEN_5, "avx2", "Some CPU (Zen 5, AVX2)"),
        ("AuthenticAMD", 23, 49, ZEN_3, None, "Some CPU (Zen 2, AVX2)"),
        ("AuthenticAMD", 21, 2, OLD, None, "Some CPU (family 21, x86-64)"),
        ("AuthenticAMD", 26, 2, ZEN_5, "avx512", "Some CPU (Zen 5, AVX512)"),
        ("GenuineIntel", 6, 85, ZEN_5.replace("avx512_bf16", "vnni"), None, "Some CPU (AVX512)"),
        ("GenuineIntel", 6, 143, ZEN_5, "baseline", "Some CPU (x86-64)"),
    ],
)
def test_a_cpu_goes_by_its_core_and_instructions(
    bench, vendor, family, model, flags, asked, expected
):
    core = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
    text = f"processor\t: 0\n{core}model name\t: Some CPU\nflags\t\t: {flags}\nbugs\t\t:\n\n"
    assert bench.common.cpu_name(text * 2, asked) == expected


def test_two_machines_have_a_table_each_and_one_of_accuracy(plot, monkeypatch, tmp_path):
    columns = ("case,op,pass,dtype,B,T,N,D,peer,threads,p50_ms,floor_fraction,ratio,error,peer_error,"
               "device,torch,kernel,commit,date")  # fmt: skip
    for name, error in (("a", "1e-07"), ("b", "2e-07")):
        row = (
            f"lstm-b1,lstm,forward,float32,1,2,1,8,torch,2,1.5,0.5,1.2,{error},3e-07,CPU {name},2,"
        )
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n{row}_fused_rnn_cpu_0,c,2026-01-01\n")
    paths = sorted(tmp_path.glob("*.csv"))
    tables = [plot.bench_table(path) for path in paths]
    assert [table.partition(",")[0] for table in tables] == ["CPU a", "CPU b"]
    assert plot.accuracy_table(paths).splitlines()[-1] == "| fp32 | 2.0e-07 | 3.0e-07 |"
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    page = "<!-- {0}:begin -->\nold\n<!-- {0}:end -->"
    assert plot.generate(page.format("bench")).splitlines()[1:-1] == "\n".join(tables).splitlines()
    none = [plot.bench_table(path, "diagonal_rnn") for path in paths]
    (tmp_path / "c.csv").write_text(f"{columns}\n{row}_diagonal_rnn_cpu_0,c,2026-01-01\n")
    only = plot.bench_table(tmp_path / "c.csv", "diagonal_rnn").splitlines()
    assert none == ["", ""]  # and no empty line in their place
    assert plot.generate(page.format("bench-diagonal")).splitlines()[1:-1] == only
