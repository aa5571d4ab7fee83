"""The CUDA engines, each on the shapes it is for: values, masks, graphs, company on the GPU."""

import pytest
import torch
from test_sequence import run, upstream

from cases import DEVICE, Case, make, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate, assert_bitwise, assert_close

CELLS = reference.CELLS
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]
MASKS = ("state", "reset", "hold", "lengths")
# width of a head: below, at and between what the engines round to
BLOCK = [
    Case(3, 7, 2, 16, MASKS),
    Case(9, 12, 3, 32, ("state",)),
    Case(17, 9, 2, 40, MASKS),
    Case(8, 33, 2, 64, ("state",)),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(5, 10, 1, 104, (*MASKS, "clip")),
    Case(16, 21, 2, 128, ("state",)),
]
CHIP = [
    Case(3, 7, 1, 136, MASKS),
    Case(8, 12, 2, 256, ("state",)),
    Case(17, 9, 1, 200, MASKS),
    Case(4, 6, 1, 320, ("state", "cu", "reset", "hold")),
    Case(5, 10, 3, 264, (*MASKS, "clip")),
    Case(1, 40, 1, 512, ()),
    Case(40, 8, 1, 768, ("state",)),
    Case(2, 6, 1, 1024, ("state",)),
]
HUGE = [Case(2, 4, 1, 2048, ("state",)), Case(2, 3, 1, 2104, ("state",)), Case(2, 3, 1, 2688, ())]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


def compare(fused_rnn, name, case, dtype, **options):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend="cuda", **options)
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    return got, peer, exact


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("engine", "case"),
    [("block", c) for c in BLOCK] + [("chip", c) for c in [BLOCK[3], BLOCK[4], *CHIP]],
    ids=str,
)
def test_engine_is_as_exact_as_the_reference(fused_rnn, monkeypatch, name, engine, case, dtype):
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    got, peer, exact = compare(fused_rnn, name, case, dtype)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (dtype, key[0] == "d"))


@pytest.mark.parametrize("case", HUGE, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_widest_heads(fused_rnn, name, case):
    got, peer, exact = compare(fused_rnn, name, case, torch.bfloat16)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (torch.bfloat16, key[0] == "d"))


@pytest.mark.parametrize("case", [BLOCK[0], BLOCK[3], CHIP[0], CHIP[1], CHIP[6]], ids=str)
def test_tf32(fused_rnn, name, case):
    """Operands keep 11 bits; sums and states are fp32. A relu whose sum is that close to 0 may flip."""
    got, _, exact = compare(fused_rnn, name, case, torch.float32, precision="tf32")
    for key in exact if name != "rnn_relu" else ("h", "last[0]"):
        assert_close(f"{name} {case} {key}", got[key].double(), exact[key], 2e-3)


@pytest.mark.parametrize("case", [BLOCK[3], CHIP[1], Case(4, 6, 2, 30, ("state",))], ids=str)
def test_cuda_graph(fused_rnn, name, case):
    """Forward and backward are captured, and every replay gives the eager bits on new input."""
    call = make(CELLS[name], case, torch.bfloat16)
    dh, dlast = upstream(name, call, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(fused_rnn.recurrent, name, call, dh, dlast)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(fused_rnn.recurrent, name, call, dh, dlast)
    for _ in range(3):
        call["x"].copy_(torch.randn_like(call["x"]))
        graph.replay()
        torch.cuda.synchronize()
        eager = run(fused_rnn.recurrent, name, call, dh, dlast)
        for key in eager:
            assert_bitwise(key, captured[key], eager[key])


@pytest.mark.parametrize(("engine", "case"), [("block", BLOCK[3]), ("chip", CHIP[6])], ids=str)
def test_in_company(fused_rnn, monkeypatch, engine, case):
    """Other streams keep the GPU busy: no call hangs, and every one gives the same bits."""
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    call = make(CELLS["lstm"], case, torch.bfloat16)
    dh, dlast = upstream("lstm", call, torch.bfloat16)
    alone = run(fused_rnn.recurrent, "lstm", call, dh, dlast)
    noise, streams = torch.randn(4096, 4096), [torch.cuda.Stream() for _ in range(3)]
    for _ in range(200):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                noise @ noise
        with torch.cuda.stream(streams[2]):
            h, _ = fused_rnn.lstm(**call)
        got = run(fused_rnn.recurrent, "lstm", call, dh, dlast)
        streams[2].synchronize()
        assert_bitwise("h", h, alone["h"])
        for key in alone:
            assert_bitwise(key, got[key], alone[key])


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
    with pytest.raises(ValueError, match="torch.float64"):
        fused_rnn.lstm(**call, backend="cuda")
