"""tfla: what CUDA asks of memory and of the stream."""

import pytest
import torch
from test_tfla import SEQUENCE, SMALL

from cases import DEVICE
from mlstm_cases import CELLS, leaves, make, names
from numerics import assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def test_rows_at_any_address(tfla, cell):
    """Bit for bit: rows of 16-bit elements that start at 2 bytes, or whose strides are odd."""
    call = make(cell, SMALL, torch.bfloat16)
    want, _ = tfla.mlstm(**call)
    for name in ("q", "k", "v"):
        x = call[name]
        wide = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)
        wide[..., 1:] = x
        call[name] = wide[..., 1:]
    assert_bitwise("h", tfla.mlstm(**call)[0], want)


def test_a_state_in_place_at_any_address(tfla, cell):
    call = make(cell, SMALL, torch.bfloat16)
    step = {k: call[k][:, 0] for k in SEQUENCE[:5]} | names(cell)
    want, last = tfla.mlstm_step(**step, state=call["state"])
    state = tuple(torch.zeros(s.numel() + 1)[1:].view_as(s).copy_(s) for s in call["state"])
    got, _ = tfla.mlstm_step(**step, state=state, inplace=True)
    assert_bitwise("h", got, want)
    for own, other in zip(state, last, strict=True):
        assert_bitwise("state", own, other)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_graph_replays_what_ran(tfla, cell):
    """Forward, backward and a step in place in one CUDA graph: nothing waits for the device."""
    call, sources = leaves(make(cell, SMALL, torch.bfloat16))
    step = {k: call[k].detach()[:, 0] for k in SEQUENCE[:5]}
    first = tuple(s.detach().clone() for s in call["state"])
    state = tuple(s.clone() for s in first)

    def work():
        for own, given in zip(state, first, strict=True):
            own.copy_(given)
        h, _ = tfla.mlstm(**call)
        grads = torch.autograd.grad(h.float().sum(), list(sources.values()), materialize_grads=True)
        with torch.no_grad():
            one, _ = tfla.mlstm_step(**step, **names(cell), state=state, inplace=True)
        return [h.detach(), *grads, one, *state]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = [t.clone() for t in work()]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    graph.replay()
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(f"output {number}", a, b)
