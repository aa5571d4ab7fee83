"""Tests the wide engine beyond what every engine's tests ask: chosen shapes, NaN, graphs."""

import random

import pytest
import torch

from cases import DEVICE, Case, make, replayed, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate, assert_bitwise
from ops.fused_rnn.test_sequence import run, upstream

CELLS = reference.CELLS
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]


def skip_unless_chosen(fused_rnn, name, case):
    width = -(-case.D // 4) * 4  # other widths run padded
    plan = fused_rnn.explain_plan(name, case.N, width, case.B, "float32", "H200", case.T)
    assert plan.engine == "wide"
    here = torch.cuda.get_device_properties(0)
    if (here.major, here.minor, here.multi_processor_count) != (9, 0, 132):
        pytest.skip("needs a GPU that has the SMs of an H200")


def random_cases(count):
    """Draws shapes for which the planner chooses the engine, with all masks or none."""
    draw = random.Random(0)
    most = {"lstm": 2048, "slstm": 1000, "gru": 2048, "rnn_tanh": 2048}
    for _ in range(count):
        name = draw.choice(list(most))
        D = int(257 * (most[name] / 257) ** draw.random())
        N = draw.choice((1, 1, 2)) if D <= 1280 else 1
        B = draw.randint(1, 100 if D < 300 and name == "rnn_tanh" else 8 if D > 640 else 32)
        masks = draw.choice(((), ("state",), ("state", "reset", "hold", "lengths")))
        yield name, Case(B, draw.randint(8, 12) if D <= 1280 else 16, N, D, masks)


@pytest.mark.parametrize(("name", "case"), list(random_cases(40)), ids=str)
def test_random_shapes(fused_rnn, name, case):
    skip_unless_chosen(fused_rnn, name, case)
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend="cuda")
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, (torch.float32, key[0] == "d"))


@pytest.mark.parametrize("name", CELLS)
def test_nan_does_not_hang(fused_rnn, name):
    """Thread blocks wait until a bit pattern is gone, which is a NaN: neither states nor gradients
    that are this NaN may keep it."""
    case = Case(3, 9, 1, 300, ("state",))
    skip_unless_chosen(fused_rnn, name, case)
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    pattern = torch.full((), -1, dtype=torch.int32).view(torch.float32)
    call["state"][0][0] = pattern
    dh[1] = pattern
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend="cuda")
    assert got["h"][0].isnan().all()
    assert got["h"][1:].isfinite().all()
    assert got["dx"][1].isnan().any()
    assert got["dx"][2].isfinite().all()


@pytest.mark.parametrize("name", CELLS)
def test_cuda_graph(fused_rnn, name):
    """Forward and backward are captured, and every replay gives the eager bits on new input."""
    case = Case(8, 9, 1, 520, ("state",))
    skip_unless_chosen(fused_rnn, name, case)
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    once, x = lambda: run(fused_rnn.recurrent, name, call, dh, dlast), call["x"]
    for captured, eager in replayed(once, lambda: x.copy_(torch.randn_like(x))):
        for key in eager:
            assert_bitwise(key, captured[key], eager[key])
