"""Tests the tables of costs: what one of a user's may hold, and which entry counts for a device."""

import os
import warnings

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from flashcell.choice import cost_model, cost_tables
from flashcell.choice.cost_model import (
    PRECISIONS,
    Call,
    Device,
    TableError,
    amounts,
    nearest,
    predict,
    read_table,
)
from torch_twins import as_file, table

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the tables do not depend on the device")

BAD = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "another format": b'{"format": 2, "devices": []}',
    "no devices": b'{"format": 1}',
    "no entries": b'{"format": 1, "devices": []}',
    "deep": b"[" * 200_000,
    "large": b" " * (2**20 + 1),
    "many digits": b'{"format": 1, "devices": ' + b"9" * 10_000 + b"}",
    "NaN": as_file(table(float("nan"), 1.0)),
    "infinite": as_file(table(float("inf"), 1.0)),
    "negative": as_file(table(-1.0, 1.0)),
    "huge": as_file(table(10**400, 1.0)),
    "a truth": as_file(table(True, 1.0)),
    "a text": as_file(table("1", 1.0)),
    "no margin": as_file(table(1.0, 1.0, margin=0)),
    "half a unit": as_file(table(1.0, 1.0, units=1.5)),
    "no units": as_file(table(1.0, 1.0, units=0)),
    "another device": as_file(table(1.0, 1.0, device="tpu")),
    "another key": as_file(table(1.0, 1.0, code="import os")),
    "a long name": as_file(table(1.0, 1.0, name="x" * 1000)),
    "costs of nothing": as_file(table(1.0, 1.0, torch={"x": {"steps": 1.0}})),
    "costs in a list": as_file(table(1.0, 1.0, torch=[])),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_table_is_named_and_left(content, use_costs):
    path = use_costs(content)
    with pytest.raises(TableError, match=r"tuned\.json"):
        read_table(content, path)
    module, x = flashcell.LSTM(4, 4), torch.randn(3, 2, 4)
    with pytest.warns(RuntimeWarning) as seen:
        module(x)
    assert len(seen) == 1
    assert path in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)
        module(torch.randn(4, 2, 4))


def test_a_table_that_cannot_be_read(use_costs, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")  # must not wait for a writer
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero", "a" * 5000):
        use_costs(b"")
        monkeypatch.setenv("FLASHCELL_TUNED", str(path))
        with pytest.warns(RuntimeWarning, match="backend='auto' decides by flashcell's own table"):
            flashcell.LSTM(4, 4)(torch.randn(3, 2, 4))
    use_costs(b"")
    monkeypatch.delenv("FLASHCELL_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashcell.LSTM(4, 4)(torch.randn(3, 2, 4))


def test_a_warning_as_an_error_comes_once(use_costs):
    use_costs(b"{")
    module, x = flashcell.LSTM(4, 4), torch.randn(3, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"tuned\.json"):
            module(x)
        module(x)


def test_the_nearest_device():
    entries = [
        table(1, 1, device="cuda", name="NVIDIA H100", capability=90, units=132),
        table(1, 1, device="cuda", name="NVIDIA H200", capability=90, units=132),
        table(1, 1, device="cuda", name="NVIDIA A100", capability=80, units=108),
        table(1, 1, name="AMD", units=1),
        table(1, 1, name="AMD", units=8),
        table(1, 1, name="Intel", units=2),
    ]
    found = lambda *device: nearest(entries, Device(*device))
    assert found("cuda", "NVIDIA H200", 90, 132)["name"] == "NVIDIA H200"
    assert found("cuda", "NVIDIA H100 PCIe", 90, 114)["name"] == "NVIDIA H100"
    assert found("cuda", "NVIDIA B200", 100, 148)["name"] in ("NVIDIA H100", "NVIDIA H200")
    assert found("cuda", "NVIDIA L4", 89, 58)["capability"] == 90
    assert found("cuda", "NVIDIA A10", 86, 72)["capability"] == 90
    assert found("cuda", "NVIDIA A30", 80, 56)["name"] == "NVIDIA A100"
    assert found("cpu", "AMD EPYC 9R14", 512, 2) == entries[3]
    assert found("cpu", "AMD EPYC 9R14", 256, 64) == entries[4]
    assert found("cpu", "Intel(R) Xeon(R) Processor @ 2.50GHz", 512, 64) == entries[5]
    assert found("cpu", "CPU", 512, 2) == entries[5]
    assert nearest(entries[:3], Device("cpu", "CPU", 512, 2)) is None


def test_amounts():
    call = Call(0, 2, 2, 0, 3, 5, 7, 8, 2, 0, 0)
    sizes = dict(zip(cost_model.AMOUNTS, amounts(call), strict=True))
    module = nn.LSTM(7, 8, 2, bidirectional=True, bias=False)
    weights = sum(p.numel() for p in module.parameters())
    assert sizes["call"] == 1
    assert sizes["layer"] == 4
    assert sizes["step"] == 20
    assert sizes["weight"] * 1e6 == pytest.approx(weights)
    assert sizes["product"] * 1e9 == pytest.approx(3 * 5 * weights)
    projected = Call(0, 1, 1, 4, 3, 5, 7, 8, 2, 0, 0)
    module = nn.LSTM(7, 8, proj_size=4, bias=False)
    weights = sum(p.numel() for p in module.parameters())
    assert dict(zip(cost_model.AMOUNTS, amounts(projected), strict=True))[
        "weight"
    ] * 1e6 == pytest.approx(weights)


def test_calls_that_run_other_code_have_costs_of_their_own():
    lstm = cost_model.Call(0, 1, 1, 0, 4, 5, 32, 32, 0, 0, 0, "grid")
    calls = [lstm, lstm._replace(packed=1), lstm._replace(projection=8)]
    calls += [lstm._replace(kind=kind) for kind in range(cost_model.CELLS, len(cost_model.KINDS))]
    for side in (0, 1):
        assert len({cost_model.groups(call, "cuda")[side] for call in calls}) == len(calls)


def test_the_shipped_table():
    entries = read_table(cost_tables.COSTS.read_bytes(), "costs.json")
    devices = {e["device"] for e in entries}
    assert devices == {"cpu", "cuda"}
    for entry in entries:
        engine = "block" if entry["device"] == "cuda" else ""
        precision = PRECISIONS.index("bf16")
        long, short = (
            predict(entry, Call(0, 1, 1, 0, 8, steps, 64, 64, precision, 0, 0, engine))
            for steps in (1000, 1)
        )
        assert long is not None
        assert short is not None
        assert 0 < short.torch_us < long.torch_us < 1e7
        assert 0 < short.kernel_us < long.kernel_us < 1e7
