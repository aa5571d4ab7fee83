"""Tests that x in heads, as a batched product leaves it, gives the bits of x without heads."""

import pytest
import torch

from cases import DEVICE, Case
from diagonal_cases import in_heads, make
from flashcell.kernels import diagonal_rnn as reference
from numerics import EPS, assert_bitwise, assert_close
from ops.diagonal_rnn.test_sequence import DTYPES, run, short, upstream

CELLS = reference.CELLS
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    ("case", "heads"),
    [
        (Case(3, 9, 1, 40, ("bias", "state", "reset", "hold")), 5),
        (Case(3, 9, 1, 33, ("bias", "lengths")), 3),
        (Case(4, 6, 1, 24, ("state", "cu")), 12),
        (Case(2, 5, 1, 2100), 2),
    ],
    ids=str,
)
def test_heads_are_read_where_they_lie(diagonal_rnn, name, case, heads, dtype):
    """The same bits as without heads, contiguous or not; the gradient of x has its layout."""
    call = make(CELLS[name], case, dtype)
    upper = upstream(name, call, dtype)
    want = run(getattr(diagonal_rnn, name), call, *upper)
    want["dx"] = in_heads(want["dx"], heads)
    for dense in (True, False):
        x = in_heads(call["x"], heads, dense)
        got = run(getattr(diagonal_rnn, name), {**call, "x": x}, *upper)
        for key in want:
            assert_bitwise(key, got[key], want[key])
    peer = run(getattr(reference, name), {**call, "x": x}, *upper)
    assert_close("h", peer["h"], want["h"], 4 * EPS[dtype])
    first = {k: call.get(k) for k in ("a", "p", "bias") if k in call}
    step = getattr(diagonal_rnn, f"{name}_step")
    together, _ = step(call["x"][:, 0], **first)
    assert_bitwise("step", step(x[:, :, 0], **first)[0], together)


@pytest.mark.skipif(DEVICE != "cuda", reason="the methods parallel in time are CUDA's")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("method", ["sequential", "multiple_shooting", "newton"])
@pytest.mark.parametrize(
    ("case", "heads"),
    [
        (Case(2, 300, 1, 48, ("bias", "state")), 6),
        (Case(3, 137, 1, 70, ("state", "reset", "hold", "lengths")), 5),
    ],
    ids=str,
)
def test_every_method_reads_heads(diagonal_rnn, name, method, case, heads, dtype):
    """The same bits. Heads of odd width in an even row use other words, and so other chunks."""
    call = make(CELLS[name], case, dtype)
    upper = upstream(name, call, dtype)
    want = run(getattr(diagonal_rnn, name), call, *upper, method=method)
    want["dx"] = in_heads(want["dx"], heads)
    x = in_heads(call["x"], heads)
    got = run(getattr(diagonal_rnn, name), {**call, "x": x}, *upper, method=method)
    for key in want:
        assert_bitwise(key, got[key], want[key])
    if case.D % 4 == 0 and dtype != torch.float32:
        x = in_heads(call["x"], case.D // 3)
        odd = run(getattr(diagonal_rnn, name), {**call, "x": x}, *upper, method=method)
        assert_close("h", odd["h"], want["h"], 2 * EPS[dtype])
        dx, same = (side.movedim(0, -2).flatten(-2) for side in (odd["dx"], want["dx"]))
        assert_close("dx", dx, same, 2 * EPS[dtype])
