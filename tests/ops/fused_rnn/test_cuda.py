"""Tests the CUDA engines, each on the shapes it is for: values, masks, graphs, busy GPUs."""

import pytest
import torch

from arch_cases import engines_of, skip_unless_offered
from cases import DEVICE, Case, make, replayed, to_device, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate, assert_bitwise, assert_close
from ops.fused_rnn.engine_cases import (
    BATCH,
    BATCH_TF32,
    BLOCK,
    CLUSTER,
    FMA,
    GEMM,
    GRID,
    HUGE,
    ODD,
    TINY,
    WIDE,
)
from ops.fused_rnn.test_sequence import run, upstream

CELLS = reference.CELLS
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


def compare(fused_rnn, name, case, dtype, change=dict, **options):
    call = change(make(CELLS[name], case, dtype))
    dh, dlast = upstream(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend="cuda", **options)
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    return got, peer, exact


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("engine", "case"),
    [("block", c) for c in BLOCK]
    + [(engine, c) for engine in ("cluster", "grid") for c in [BLOCK[3], BLOCK[4]]]
    + [("cluster", c) for c in CLUSTER]
    + [("grid", c) for c in GRID]
    + [("gemm", c) for c in GEMM]
    + [("batch", c) for c in BATCH],
    ids=str,
)
def test_engine_is_as_exact_as_the_reference(fused_rnn, monkeypatch, name, engine, case, dtype):
    skip_unless_offered(fused_rnn, engine, name, case, dtype)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    change = far_from_zero if name == "rnn_relu" else dict
    got, peer, exact = compare(fused_rnn, name, case, dtype, change)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (dtype, key[0] == "d"))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_batch_engine_that_saves_nothing(fused_rnn, monkeypatch, name, case, dtype):
    """It may have other tiles then."""
    skip_unless_offered(fused_rnn, "batch", name, case, dtype)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
    call = make(CELLS[name], case, dtype)
    got, peer, exact = (
        {"h": h, **{f"last[{i}]": s for i, s in enumerate(last)}}
        for h, last in (
            fused_rnn.recurrent(name, **call, backend="cuda"),
            reference.recurrent(name, **call),
            reference.recurrent(name, **upcast(call)),
        )
    )
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (dtype, False))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_widths(fused_rnn, name, case, dtype):
    """Padded to whole vectors, they give the results and shapes of their own width."""
    change = far_from_zero if name == "rnn_relu" else dict
    got, peer, exact = compare(fused_rnn, name, case, dtype, change)
    for key in exact:
        assert got[key].shape == exact[key].shape
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (dtype, key[0] == "d"))


@pytest.mark.parametrize(
    ("engine", "case"),
    [("gemm", c) for c in [GEMM[1], GEMM[2], ODD[1], ODD[3]]]
    + [("fma", c) for c in [*FMA, *ODD[:3]]]
    + [("wide", c) for c in [*WIDE, ODD[3]]],
    ids=str,
)
def test_exact_fp32(fused_rnn, monkeypatch, name, engine, case):
    skip_unless_offered(fused_rnn, engine, name, case, torch.float32)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    change = far_from_zero if name == "rnn_relu" else dict
    got, peer, exact = compare(fused_rnn, name, case, torch.float32, change)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (torch.float32, key[0] == "d"))


@pytest.mark.parametrize("case", HUGE, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_widest_heads(fused_rnn, name, case):
    got, peer, exact = compare(fused_rnn, name, case, torch.bfloat16)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (torch.bfloat16, key[0] == "d"))


@pytest.mark.parametrize("case", [BLOCK[0], BLOCK[3], GRID[0], GRID[1], GRID[6], GEMM[4]], ids=str)
def test_tf32(fused_rnn, name, case):
    """Operands keep 11 bits; sums and states are fp32."""
    change = far_from_zero if name == "rnn_relu" else dict
    got, _, exact = compare(fused_rnn, name, case, torch.float32, change, precision="tf32")
    for key in exact:
        assert_close(f"{name} {case} {key}", got[key].double(), exact[key], 2e-3)
    if name == "rnn_relu":
        assert exact["h"][exact["h"] > 0].min() > 0.5


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "saves nothing"])
@pytest.mark.parametrize("case", BATCH_TF32, ids=str)
def test_batch_engine_in_tf32(fused_rnn, monkeypatch, name, case, saves):
    skip_unless_offered(fused_rnn, "batch", name, case, torch.float32, tf32=True)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
    change = far_from_zero if name == "rnn_relu" else dict
    if saves:
        got, _, exact = compare(fused_rnn, name, case, torch.float32, change, precision="tf32")
    else:
        call = change(make(CELLS[name], case, torch.float32))
        got, exact = (
            {"h": h, **{f"last[{i}]": s for i, s in enumerate(last)}}
            for h, last in (
                fused_rnn.recurrent(name, **call, backend="cuda", precision="tf32"),
                reference.recurrent(name, **upcast(call)),
            )
        )
    for key in exact:
        assert_close(f"{name} {case} {key}", got[key].double(), exact[key], 2e-3)


def far_from_zero(call):
    """Draws inputs whose sums keep their signs in any precision: a relu near 0 could flip, and its
    gradient with it."""
    x = call["x"] + 4 * call["x"].sign()
    return {**call, "x": x, "weight": 0.2 * call["weight"], "bias": 0.1 * call["bias"]}


@pytest.mark.parametrize(
    "case", [BLOCK[3], GRID[1], Case(4, 6, 2, 30, ("state",)), BATCH[-1]], ids=str
)
def test_cuda_graph(fused_rnn, name, case):
    """Forward and backward are captured, and every replay gives the eager bits on new input."""
    call = make(CELLS[name], case, torch.bfloat16)
    dh, dlast = upstream(name, call, torch.bfloat16)
    once, x = lambda: run(fused_rnn.recurrent, name, call, dh, dlast), call["x"]
    for captured, eager in replayed(once, lambda: x.copy_(torch.randn_like(x))):
        for key in eager:
            assert_bitwise(key, captured[key], eager[key])


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("engine", "case"),
    [
        ("block", Case(8, 4, 2, 64)),
        ("cluster", Case(8, 4, 3, 256)),
        ("grid", Case(8, 4, 1, 768)),
        ("grid", Case(104, 4, 1, 768)),  # wide tiles in tall blocks
        ("step", Case(8, 2, 1, 72)),
        ("gemm", Case(64, 2, 1, 136)),
        ("batch", Case(64, 4, 1, 136)),
        ("batch", Case(300, 3, 1, 384)),
        ("fma", Case(8, 4, 2, 64)),
        ("fma", Case(40, 4, 1, 256)),
        ("wide", Case(8, 4, 1, 512)),
    ],
    ids=str,
)
def test_in_company(fused_rnn, monkeypatch, engine, case, pass_):
    """Other streams keep the GPU busy: of 10,000 launches none hangs, and all give the same bits."""
    dtype = torch.float32 if engine in ("fma", "wide") else torch.bfloat16
    skip_unless_offered(fused_rnn, engine, "lstm", case, dtype)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    call = make(CELLS["lstm"], case, dtype)
    x = call["x"].requires_grad_(pass_ == "backward")
    h, _ = fused_rnn.lstm(**call)
    dh = torch.randn_like(h)
    once = lambda: (
        torch.autograd.grad(h, x, dh, retain_graph=True)[0]
        if pass_ == "backward"
        else fused_rnn.lstm(**call)[0]
    )
    alone, differ = once(), torch.zeros((), dtype=torch.int64)
    noise, streams = torch.randn(2048, 2048), [torch.cuda.Stream() for _ in range(2)]
    for n in range(10_000):
        if n % 20 == 0:
            for stream in streams:
                with torch.cuda.stream(stream):
                    noise @ noise
        differ += (once() != alone).any()
    torch.cuda.synchronize()
    assert differ == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float32"])
@pytest.mark.parametrize(
    ("engine", "case"), [(engine, c) for engine, cases in TINY.items() for c in cases], ids=str
)
def test_tiny(fused_rnn, monkeypatch, name, engine, case, dtype):
    """Runs every kernel once, and nothing else on the GPU, for scripts/check_cuda."""
    io = getattr(torch, dtype.replace("tf32", "float32"))
    options = {"precision": "tf32"} if dtype == "tf32" else {}
    if engine not in engines_of(fused_rnn, name, case, io, tf32=dtype == "tf32"):
        pytest.skip("not this engine's")
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    # CuBLAS computes wider heads, and a single one.
    monkeypatch.setattr(fused_rnn.backward, "WIDEST_OWN_DWEIGHT", case.D)
    monkeypatch.setattr(fused_rnn.backward, "LEAST_OWN_HEADS", 1)
    with torch.device("cpu"):
        call = make(CELLS[name], case, io, "cpu")
        dh, dlast = upstream(name, call, io)
        exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    arguments = to_device(call, DEVICE), dh.to(DEVICE), dlast.to(DEVICE)
    got = run(fused_rnn.recurrent, name, *arguments, backend="cuda", **options)
    tolerance = {"bfloat16": 3e-2, "float16": 5e-3, "tf32": 3e-3, "float32": 1e-5}[dtype]
    for key in exact if name != "rnn_relu" else ("h", "last[0]"):
        assert_close(f"{name} {case} {key}", got[key].cpu().double(), exact[key], tolerance)


@pytest.mark.parametrize(("engine", "D"), [("block", 64), ("cluster", 160)])
def test_an_empty_column_may_hold_anything(fused_rnn, monkeypatch, name, engine, D):
    """A tile's columns without a sequence read what an earlier launch left in shared memory: here NaN."""
    case = Case(9, 3, 1, D)
    skip_unless_offered(fused_rnn, engine, name, case, torch.bfloat16)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    call = make(CELLS[name], case, torch.bfloat16)
    inputs = [call[k].requires_grad_() for k in ("x", "weight", "bias")]
    h, _ = fused_rnn.recurrent(name, **call)
    gradients = lambda: torch.autograd.grad(h, inputs, torch.ones_like(h), retain_graph=True)
    want = gradients()
    whole = make(CELLS[name], Case(512, 3, 1, D), torch.bfloat16)  # all columns of all tiles
    whole["x"].fill_(torch.nan).requires_grad_()
    fused_rnn.recurrent(name, **whole)[0].sum().backward()
    for key, got, usual in zip(("dx", "dweight", "dbias"), gradients(), want, strict=True):
        assert usual.isfinite().all()
        assert_bitwise(key, got, usual)


def test_no_drift(fused_rnn):
    """The error of h does not grow with T: the last steps of 4,096 are as exact as the first."""
    call = make(CELLS["lstm"], Case(2, 4096, 2, 64, ("state",)), torch.bfloat16)
    h, _ = fused_rnn.lstm(**call)
    exact, _ = reference.lstm(**upcast(call))
    norm = lambda y: y.transpose(0, 1).flatten(1).norm(dim=1)
    error = norm(h.double() - exact) / norm(exact)
    assert error[-256:].mean() < 1.2 * error[:256].mean()
    assert error.mean() < 3.5e-3


def test_fp64_is_the_references(fused_rnn):
    call = make(CELLS["lstm"], BLOCK[0], torch.float64)
    h, _ = fused_rnn.lstm(**call)
    assert_bitwise("h", h, reference.lstm(**call)[0])
    with pytest.raises(ValueError, match=r"torch\.float64"):
        fused_rnn.lstm(**call, backend="cuda")
