"""Tests diagonal-rnn's calls on CUDA: determinism, graphs, streams, invalid values, more than 2^31
elements."""

import pytest
import torch

from cases import DEVICE, Case, replayed
from diagonal_cases import leaves, make
from numerics import assert_bitwise, assert_close
from ops.diagonal_rnn.test_cuda import CELLS, LONG, METHODS, WAYS, backward_call
from ops.diagonal_rnn.test_sequence import run

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_deterministic(diagonal_rnn, name, method, way):
    """Bitwise the same, also while other work changes the order of thread blocks."""
    call, dh, dlast = backward_call(name, way, ("state", "reset"), torch.bfloat16)
    first = run(getattr(diagonal_rnn, name), call, dh, dlast, method=method)
    noise, stream = torch.randn(1024, 1024), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream):
            noise @ noise
        again = run(getattr(diagonal_rnn, name), call, dh, dlast, method=method)
        for key, value in again.items():
            assert_bitwise(key, value, first[key])
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", WAYS)
def test_cuda_graph(diagonal_rnn, name, method, way):
    """Forward and backward are captured, and every replay gives the eager bits on new input."""
    call, dh, dlast = backward_call(name, way, ("state",), torch.float32)
    call, sources = leaves(call)
    function, x = getattr(diagonal_rnn, name), call["x"]

    def once():
        h, last = function(**call, method=method)
        return [h, *last, *torch.autograd.grad((h, *last), list(sources.values()), (dh, *dlast))]

    for captured, eager in replayed(once, lambda: x.copy_(torch.randn_like(x))):
        for k, (got, want) in enumerate(zip(captured, eager, strict=True)):
            assert_bitwise(f"output {k}", got, want)


def test_runs_on_the_current_stream(diagonal_rnn, method):
    call = make(CELLS["flash_lstm"], LONG[0], torch.float32)
    want, _ = diagonal_rnn.flash_lstm(**call, method=method)
    late, stream = {**call, "x": torch.zeros_like(call["x"])}, torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["x"].copy_(call["x"])
        h, _ = diagonal_rnn.flash_lstm(**late, method=method)
    stream.synchronize()
    assert_bitwise("h", h, want)


def test_values_out_of_range_are_clamped(diagonal_rnn, method):
    """CUDA does not read lengths and cu_seqlens on the host; values outside are clamped to the
    bound."""
    call = make(CELLS["flash_gru"], Case(3, 70, 1, 40, ("state",)), torch.float32)
    wild, tame = torch.tensor([-5, 90, 33]), torch.tensor([0, 70, 33])
    h, last = diagonal_rnn.flash_gru(**call, lengths=wild, method=method)
    want, ends = diagonal_rnn.flash_gru(**call, lengths=tame, method=method)
    assert_bitwise("h", h, want)
    assert_bitwise("last", last[0], ends[0])
    packed = {**call, "x": call["x"].flatten(0, 1)[None]}
    cu = torch.tensor([0, 300, 150, 210], dtype=torch.int32)
    h, _ = diagonal_rnn.flash_gru(**packed, cu_seqlens=cu, method=method)
    assert h.shape == (1, 210, 40)


def test_more_than_31_bits_of_elements(diagonal_rnn):
    """The last sequence of 2.4e9 elements equals itself alone, forward and backward, and as a scan."""
    B, T, D = 3, 32768, 8192
    x = torch.randn(B, T, 3, D, dtype=torch.bfloat16)
    a = 0.5 * torch.randn(3, D)
    results = []
    for part in (x, x[-1:].contiguous()):
        part.requires_grad_()
        h, _ = diagonal_rnn.flash_gru(part, a, method="sequential")
        (dx,) = torch.autograd.grad(h, part, torch.ones_like(h))
        results.append((h[-1:], dx[-1:]))
    (h, dx), (h_alone, dx_alone) = results
    assert_bitwise("h", h, h_alone)
    assert_close("dx", dx, dx_alone, 4e-3)  # two ways to compute the gradient, both rounded to bf16
    gates = x.detach().view(B, 3 * T, D).sigmoid()
    scanned = diagonal_rnn.linear_scan(gates, x.view(B, 3 * T, D).detach())
    assert_bitwise(
        "scan", scanned[-1:], diagonal_rnn.linear_scan(gates[-1:], x[-1:].view(1, -1, D))
    )
