"""Tests the stand-ins under torch.compile: modules in one graph, and modules that a graph breaks at."""

import warnings

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from numerics import assert_bitwise
from torch_twins import (
    CELLS,
    SEQUENCES,
    assert_same,
    compute,
    flatten,
    make_inputs,
    make_twins,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")

COMPILED = [
    {},
    {"batch_first": True, "num_layers": 2, "bias": False},
    {"bidirectional": True, "num_layers": 2},
]


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("kwargs", COMPILED, ids=str)
def test_compiles_to_one_graph(kind, kwargs):
    extra = {"proj_size": 3} if kind == "LSTM" else {}
    _, ours = make_twins(kind, 6, 8, **kwargs, **extra)
    x, hx = make_inputs(ours, 4)
    torch._dynamo.reset()  # all modules share one forward, which may have eight graphs
    with torch._dynamo.config.patch(allow_rnn=True):
        got = compute(torch.compile(ours, fullgraph=True, backend="aot_eager"), x, hx)
    assert_same({k.replace("_orig_mod.", ""): v for k, v in got.items()}, compute(ours, x, hx), 0.0)


def test_compiles_around_the_module():
    """Without allow_rnn the graph breaks at the module, and the rest is compiled, as with torch.nn's
    module: torch.compile warns of nothing and compiles no piece of ours."""
    x, frames = torch.randn(5, 3, 4), []
    for kind in (nn.LSTM, flashcell.LSTM):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Sequential(nn.Linear(4, 6), kind(6, 8))
        compiled = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for T in (5, 4, 3):
                got = compiled(x[:T])[0].detach()
                assert_bitwise("output", got, model(x[:T])[0].detach())
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert frames[1] == frames[0]


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_a_part_of_the_graph(kind):
    _, cell = make_twins(kind, 6, 8)
    x = torch.randn(4, 6)

    def run(x):
        return [t * 2 for t in flatten(cell(x))]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for ours, want in zip(got, run(x), strict=True):
        assert_bitwise("output", ours.detach(), want.detach())
