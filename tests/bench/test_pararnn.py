"""Tests bench_ops --suite pararnn: its cases, its floors, and the tables that plot_bench makes of
its rows."""

import csv

import pytest


@pytest.fixture
def suite():
    from bench.suites.diagonal_rnn import cases_cuda

    return cases_cuda


def test_a_case_and_pass_is_one_row(suite):
    """Two cases of one name would hide each other's rows in the tables."""
    cases = [*suite.MUST, *suite.SCANS, *suite.SWEEP, *suite.CROSSOVER]
    names = [(case.name, case.which) for case in cases]
    assert len(set(names)) == len(names)
    assert sum(case.limit is not None for case in cases) == 22


def test_floors(suite):
    """Every byte is read and written once: x and h forward; h, x, dh and dx backward; with the LSTM
    c too."""
    elements = 8 * 2048 * 4096
    words = {(c.op, c.which): suite.bytes_moved(c) / elements / 4 for c in suite.MUST[:8:2]}
    assert words == {
        ("flash_gru", "forward"): 4,
        ("flash_gru", "backward"): 8,
        ("flash_lstm", "forward"): 5,
        ("flash_lstm", "backward"): 9,
    }


def test_tables_show_what_missed_and_only_this_kernel(plot, tmp_path):
    common = {"op": "flash_gru", "form": "op", "pass": "forward", "dtype": "float32"}
    common |= {"B": 8, "T": 2048, "N": 1, "D": 4096, "floor_ms": 0.25, "ratio": 1}
    common |= {"device": "NVIDIA H200", "driver": "1", "torch": "2", "commit": "c", "date": "d"}
    ours = {"kernel": "_diagonal_rnn_cuda_0"}
    rows = [
        {"case": "a", "provider": "ours", "p50_ms": 0.5, "limit_ms": 0.4, **common, **ours},
        {"case": "a", "provider": "pararnn-torch", "p50_ms": 3.1, "limit_ms": "", **common, **ours},
        {"case": "b", "provider": "ours", "p50_ms": 0.05, "limit_ms": 0.4, **common, **ours},
        {"case": "c", "provider": "ours", "p50_ms": 9, "limit_ms": 1, **common, "kernel": "_tfla_cuda_0"},
    ]  # fmt: skip
    path = tmp_path / "gpu.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table, _ = plot.TABLES["diagonal-marks"]
    lines = table(path).splitlines()[4:]
    assert len(lines) == 2
    assert lines[0].endswith("| 0.5 ms | **0.4** | pararnn-torch 3.1 ms |")
    assert "| 50 us | 0.4 |" in lines[1]
