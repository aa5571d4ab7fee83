"""Tests padding, which only CUDA uses, on any device: odd widths as whole vectors, PackedSequences as
rows. Outputs, states and every gradient are torch.nn's, in float64."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from flashcell.kernels.fused_rnn import forward, packed, plain

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA it runs so by itself")
NETS = {
    "lstm": ("LSTM", {}),
    "lstm-2-bi": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "lstm-proj": ("LSTM", {"num_layers": 2, "proj_size": 5, "bidirectional": True}),
    "gru-3": ("GRU", {"num_layers": 3}),
    "gru-no-bias": ("GRU", {"bias": False, "bidirectional": True}),
    "rnn-tanh": ("RNN", {"num_layers": 2}),
    "rnn-relu": ("RNN", {"nonlinearity": "relu", "batch_first": True}),
}
I, D, B, T = 7, 13, 4, 9


@pytest.fixture(params=["all layers at once", "layer by layer"])
def padded(monkeypatch, request):
    """Pads every width to a multiple of 8, and counts how often."""
    widths = []
    if request.param == "layer by layer":  # as in traces
        monkeypatch.setattr(forward, "run_ordinary_sequence", lambda *args: None)
        monkeypatch.setattr(forward, "is_plain", lambda *args: False)

    def to_eights(device_type, dtype, steps, width, rows=1, state=True):
        widths.append(width)
        return -(-width // 8) * 8

    for module in (forward, plain):
        monkeypatch.setattr(module, "padded_width", to_eights)
    monkeypatch.setattr(packed, "ROW_DEVICES", ("cpu",))
    return widths


def run(module, x, hx, upstream):
    leaves = [x.data if not isinstance(x, torch.Tensor) else x, *hx, *module.parameters()]
    output, last = module(x, hx if len(hx) > 1 else hx[0])
    last = last if isinstance(last, tuple) else (last,)
    data = output if isinstance(output, torch.Tensor) else output.data
    sums = [(value * up).sum() for value, up in zip((data, *last), upstream, strict=False)]
    return [data, *last, *torch.autograd.grad(sum(sums), leaves)]


def compare(net, x, hx):
    kind, options = NETS[net]
    mine = getattr(flashcell, kind)(I, D, dtype=torch.float64, **options)
    peer = getattr(torch.nn, kind)(I, D, dtype=torch.float64, **options)
    mine.load_state_dict(peer.state_dict())
    with torch.no_grad():
        output, last = peer(x, hx if len(hx) > 1 else hx[0])
    data = output if isinstance(output, torch.Tensor) else output.data
    upstream = [
        torch.randn_like(v) for v in (data, *(last if isinstance(last, tuple) else (last,)))
    ]
    for got, want in zip(run(mine, x, hx, upstream), run(peer, x, hx, upstream), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def states(net):
    kind, options = NETS[net]
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    widths = (options.get("proj_size") or D, D) if kind == "LSTM" else (D,)
    made = (torch.randn(rows, B, width, dtype=torch.float64) for width in widths)
    return tuple(state.requires_grad_() for state in made)


@pytest.mark.parametrize("net", NETS)
def test_odd_widths_are_padded(padded, net):
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    if NETS[net][1].get("batch_first"):
        x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    compare(net, x, states(net))
    assert D in padded


@pytest.mark.parametrize("lengths", [[9, 9, 4, 1], [3, 3, 3, 3], [9, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("net", ["lstm", "lstm-2-bi", "lstm-proj", "gru-3", "rnn-tanh"])
def test_a_packed_sequence_as_rows(padded, net, lengths):
    steps = sum(lengths)
    data = torch.randn(T, B, I, dtype=torch.float64)
    x = pack_padded_sequence(data[: lengths[0]], torch.tensor(lengths))
    assert len(x.data) == steps
    x = x._replace(data=x.data.requires_grad_())
    compare(net, x, states(net))
    batch = packed.describe(x.batch_sizes, torch.device("cpu"))
    assert (batch.inverse is None) == (B * lengths[0] <= packed.MOST_PADDED * steps)


def test_sequences_of_very_different_lengths_stay_documents(padded):
    """Rows would be padding for the most part."""
    sizes = torch.tensor([40] + [1] * 400)
    assert packed.describe(sizes, torch.device("cpu")).shape == (1, 440)
