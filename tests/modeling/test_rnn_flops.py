"""Tests what torch.utils.flop_counter counts: the products of torch.nn's own modules."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import flashcell
from cases import DEVICE

I, D, B, T = 3, 4, 2, 5
MODULES = {
    "LSTM": ("LSTM", {}),
    "GRU": ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "RNN": ("RNN", {"num_layers": 2, "bias": False}),
    "LSTM both ways": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "LSTM with a projection": ("LSTM", {"proj_size": 2, "num_layers": 2}),
    "LSTMCell": ("LSTMCell", {}),
    "GRUCell": ("GRUCell", {"bias": False}),
    "RNNCell": ("RNNCell", {}),
}
FORMS = ["", "states", "packed"]


def count(module, form, wants_dx):
    """Returns the operations of the forward and of both passes."""
    is_cell, pair = isinstance(module, nn.RNNCellBase), "LSTM" in type(module).__name__
    first = not is_cell and module.batch_first
    x = torch.randn(*((B, I) if is_cell else (B, T, I) if first else (T, B, I)))
    x.requires_grad_(wants_dx)
    hx = None
    if form == "states":
        rows = () if is_cell else (module.num_layers * (1 + module.bidirectional),)
        widths = [getattr(module, "proj_size", 0) or D, D][: 1 + pair]
        hx = tuple(torch.randn(*rows, B, w, requires_grad=True) for w in widths)
        hx = hx if pair else hx[0]
    given = x if form != "packed" else pack_padded_sequence(x, [5, 3], batch_first=first)
    with FlopCounterMode(display=False) as counter:
        y = module(given, hx)
        forward = counter.get_total_flops()
        y = y[0] if isinstance(y, tuple) else y
        (y.data if form == "packed" else y).sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("wants_dx", [False, True], ids=["", "dx"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODULES)
def test_torch_nn_counts_the_same(name, form, wants_dx):
    kind, options = MODULES[name]
    if form == "packed" and kind.endswith("Cell"):
        pytest.skip("cells take no packed sequence")
    if form == "packed" and "proj_size" in options:
        pytest.skip("runs in padded rows, with other products, which count as they are")
    theirs, ours = getattr(nn, kind)(I, D, **options), getattr(flashcell, kind)(I, D, **options)
    ours.kernel_backend = DEVICE
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        want = count(theirs, form, wants_dx)
    count(ours, form, wants_dx)  # a process's first call loads the kernel, and the formulas with it
    assert count(ours, form, wants_dx) == want
    assert want[1] > want[0] > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_a_cell_in_inference(kind, bias):
    found = []
    for library in (nn, flashcell):
        cell, x = getattr(library, kind)(I, D, bias=bias), torch.randn(B, I)
        with torch.no_grad():
            cell(x)
            with FlopCounterMode(display=False) as counter:
                cell(x)
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("wants_dweight", [False, True], ids=["", "dweight"])
def test_the_ops_of_cells(fused_rnn, wants_dweight):
    x, weight = torch.randn(B, T, 4, 1, D, requires_grad=True), torch.randn(4, 1, D, D)
    weight.requires_grad_(wants_dweight)
    with FlopCounterMode(display=False) as counter:
        h, _ = fused_rnn.lstm(x, weight)
        forward = counter.get_total_flops()
        h.sum().backward()
    assert forward == 2 * B * T * 4 * D * D
    assert counter.get_total_flops() == forward * (2 + wants_dweight)


def test_a_linear_layer(fused_rnn):
    x, weight = torch.randn(B, T, I, requires_grad=True), torch.randn(D, I, requires_grad=True)
    counts = []
    for linear in (fused_rnn.linear, nn.functional.linear):
        with FlopCounterMode(display=False) as counter:
            linear(x, weight).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * B * T * D * I] * 2


def test_the_counter_may_be_imported_late():
    """The formulas are registered when it is, in a process that has run a kernel before."""
    code = """if True:
        import sys, torch, flashcell
        module, x = flashcell.GRUCell(3, 4, backend="cpu"), torch.randn(2, 3)
        module(x)
        from importlib.util import find_spec
        assert find_spec("torch.utils.flop_counter") and "torch.utils.flop_counter" not in sys.modules
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            module(x)
        print(counter.get_total_flops())
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 2 * 2 * 12 * (3 + 4)
