"""Tests the stand-ins on a GPU against torch.nn in float64 on the CPU, with cuDNN's fp32 error as
the measure."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from numerics import rms

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")
OPTIONS = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "stacked": {"num_layers": 3},
    "batch-first": {"batch_first": True},
    "projected": {"proj_size": 24},
    "packed": {},
}


def results(module, x, dy, lengths):
    x = x.clone().requires_grad_()
    given = x if lengths is None else pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, last = module(given)
    y = y if lengths is None else y.data
    last = last if isinstance(last, torch.Tensor) else last[1]
    loss = (y * dy[: y.numel()].view(y.shape)).sum() + last.sum()
    return [y, last, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("width", [48, 160])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_as_exact_as_cudnn(fused_rnn, monkeypatch, kind, option, width):
    if option == "projected" and kind != "LSTM":
        pytest.skip("torch projects the LSTM only")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    T = 520 if option == "stacked" else 40
    cudnn = getattr(torch.nn, kind)(32, width, **OPTIONS[option])
    ours = copy.deepcopy(cudnn)
    flashcell.replace(ours)
    assert type(ours) is getattr(flashcell, kind)
    exact = copy.deepcopy(cudnn).double().cpu()
    x = torch.randn(T, 5, 32)
    dy = torch.randn(T * 5 * 2 * width)
    lengths = torch.tensor([T, 3, 17, 1, T - 1], device="cpu") if option == "packed" else None
    got, peer = (results(m, x, dy, lengths) for m in (ours, cudnn))
    want = results(exact, x.double().cpu(), dy.double().cpu(), lengths)
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        a, b = a.double().cpu(), b.double().cpu()
        assert rms(a - c) <= 3 * rms(b - c) + 1e-6 * rms(c), (
            f"{k}: {rms(a - c)}, cuDNN {rms(b - c)}"
        )


# Tiles of 64 and of 128 rows; depths and widths that end within a tile; a product in several parts.
LARGE = [
    (256, 20, 512, 512, {}),
    (70, 33, 300, 420, {"bidirectional": True}),
    (600, 5, 96, 1000, {}),
]


@pytest.mark.parametrize(("B", "T", "I", "H", "options"), LARGE)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_large_products_are_as_exact_as_cudnn(fused_rnn, monkeypatch, kind, B, T, I, H, options):
    """Products of the inputs, of the steps and of the weights' gradients, all on tensor cores."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    cudnn = getattr(torch.nn, kind)(I, H, **options)
    ours = getattr(flashcell, kind)(I, H, **options, backend="cuda")
    ours.load_state_dict(cudnn.state_dict())
    exact = copy.deepcopy(cudnn).double()
    x, dy = torch.randn(T, B, I), torch.randn(T * B * 2 * H)
    got, peer = (results(m, x, dy, None) for m in (ours, cudnn))
    want = results(exact, x.double(), dy.double(), None)
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        assert rms(a - c) <= 2 * rms(b - c) + 2e-7 * rms(c), f"{k}: {rms(a - c)}, {rms(b - c)}"


# By one product for each gate, by a batch of the gates, by our kernel; layers side by side.
DEEP = [
    ("exact", 1000, 24, 256, {"bidirectional": True}),
    ("exact", 50, 4, 100, {"bidirectional": True}),
    ("exact", 64, 64, 100, {"bidirectional": True}),
    ("tf32", 16, 1024, 320, {"num_layers": 3}),
    ("bf16", 1040, 64, 200, {"bidirectional": True}),
    ("bf16", 256, 16, 200, {"bidirectional": True}),
]


@pytest.mark.parametrize(("precision", "B", "T", "H", "options"), DEEP)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_of_recurrent_weights(fused_rnn, monkeypatch, kind, precision, B, T, H, options):
    """Sums over all rows, which dweight_by (csrc/cuda/stack/run.h) divides in several ways."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    cudnn = getattr(torch.nn, kind)(48, H, dtype=dtype, **options)
    ours = getattr(flashcell, kind)(48, H, dtype=dtype, **options, backend="cuda")
    ours.load_state_dict(cudnn.state_dict())
    exact = copy.deepcopy(cudnn).double()
    x, dy = torch.randn(T, B, 48, dtype=dtype), torch.randn(T * B * 2 * H, dtype=dtype)
    got, peer = (results(m, x, dy, None) for m in (ours, cudnn))
    want = results(exact, x.double(), dy.double(), None)
    least = 2**-11 if precision == "tf32" else 4 * torch.finfo(dtype).eps  # operands are rounded
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        assert rms(a - c) <= 2 * rms(b - c) + least * rms(c), f"{k}: {rms(a - c)}, {rms(b - c)}"


def cell_results(cell, x, hx, weight):
    x, *hx = (t.clone().requires_grad_() for t in (x, *hx))
    out = cell(x, None if not hx else tuple(hx) if isinstance(cell, torch.nn.LSTMCell) else hx[0])
    out = out if isinstance(out, tuple) else (out,)
    loss = sum((y * weight).sum() for y in out)
    # One at a time: torch.nn's LSTMCell gives both biases one gradient tensor, which tests refuse.
    gradients = [
        torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        for leaf in (x, *hx, *cell.parameters())
    ]
    return [*out, *gradients]


# Sizes that the kernels multiply by themselves, with tensor cores and without, and that cuBLAS does.
# In 16 bits rows are read in pieces of 16, 8, 4 and 2 bytes.
SIZES = [(1, 64, 48), (7, 33, 50), (24, 64, 1000), (128, 700, 130), (50, 24, 600), (300, 350, 350)]
SIZES += [(9, 8, 8), (65, 100, 300), (300, 351, 350)]


@pytest.mark.parametrize(("B", "I", "D"), SIZES)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_are_as_exact_as_torchs(fused_rnn, kind, dtype, state, B, I, D):
    """With torch's default settings, which do not round the operands of fp32 products to TF32."""
    theirs = getattr(torch.nn, kind)(I, D, dtype=dtype)
    ours = getattr(flashcell, kind)(I, D, dtype=dtype, backend="cuda")
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double().cpu()
    x, weight = torch.randn(B, I, dtype=dtype), torch.randn(B, D, dtype=dtype)
    hx = [torch.randn(B, D, dtype=dtype) for _ in range(2 if kind == "LSTMCell" else 1)] * state
    got, peer = (cell_results(m, x, hx, weight) for m in (ours, theirs))
    double = lambda t: t.double().cpu()
    want = cell_results(exact, double(x), list(map(double, hx)), double(weight))
    least = 4 * torch.finfo(dtype).eps
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        assert rms(double(a) - c) <= 2 * rms(double(b) - c) + least * rms(c), f"result {k}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_read_rows_that_begin_anywhere(fused_rnn, kind, dtype):
    """Of 16, 8 and 4 bytes the sums have one order; rows at an odd element go another way."""
    cell = getattr(flashcell, kind)(64, 96, dtype=dtype, backend="cuda")
    wide, count = torch.randn(70, 256, dtype=dtype), 2 if kind == "LSTMCell" else 1
    x, *hx = (torch.randn(70, width, dtype=dtype) for width in (64, *[96] * count))
    found = {}
    for offset in (0, 8, 4, 2, 1):
        moved = []
        for value in (x, *hx):
            rows = torch.full_like(wide, torch.nan)[:, offset : offset + value.shape[1]]
            moved.append(rows.copy_(value))
        with torch.no_grad():
            out = cell(moved[0], tuple(moved[1:]) if count == 2 else moved[1])
        found[offset] = out if isinstance(out, tuple) else (out,)
    for offset, values in found.items():
        for value, first in zip(values, found[0], strict=True):
            torch.testing.assert_close(
                value, first, **({"rtol": 0, "atol": 0} if offset != 1 else {})
            )


@pytest.mark.parametrize(("B", "I", "D"), SIZES)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_gradients_of_weights_do_not_depend_on_others(fused_rnn, kind, state, B, I, D):
    """They have the same bits whether or not x and the states need gradients."""
    cell = getattr(flashcell, kind)(I, D, dtype=torch.bfloat16, backend="cuda")
    x, dy = (torch.randn(B, n, dtype=torch.bfloat16) for n in (I, D))
    hx = [torch.randn(B, D, dtype=torch.bfloat16) for _ in range(2 if kind == "LSTMCell" else 1)]
    found = []
    for needed in (False, True):
        given = [t.clone().requires_grad_(needed) for t in (x, *hx)]
        pair = tuple(given[1:]) if kind == "LSTMCell" else given[1]
        y = cell(given[0], pair if state else None)
        y = y[0] if isinstance(y, tuple) else y
        found.append(torch.autograd.grad(y, [*cell.parameters()], dy))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("B", "I", "D"), SIZES)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_one_step_of_stacked_layers_is_as_exact_as_cudnns(
    fused_rnn, monkeypatch, kind, dtype, state, B, I, D
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    options = {"num_layers": 3, "batch_first": state, "bias": B != 7}
    theirs = getattr(torch.nn, kind)(I, D, dtype=dtype, **options)
    ours = getattr(flashcell, kind)(I, D, dtype=dtype, backend="cuda", **options)
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(*((B, 1) if state else (1, B)), I, dtype=dtype)
    hx = [torch.randn(3, B, D, dtype=dtype) for _ in range(2 if kind == "LSTM" else 1)] * state
    weight = torch.randn(B, D, dtype=dtype)

    def run(module, convert):
        given = [convert(t).clone().requires_grad_() for t in (x, *hx)]
        states = given[1:]
        pair = tuple(states) if kind == "LSTM" else states[0] if states else None
        y, last = module(given[0], pair if states else None)
        last = last if isinstance(last, tuple) else (last,)
        scale = convert(weight)
        loss = (y * scale.view(B, 1, D).view_as(y)).sum() + sum((s * scale).sum() for s in last)
        leaves = [*given, *module.parameters()]
        return [y, *last, *torch.autograd.grad(loss, leaves)]

    got, peer = (run(m, lambda t: t) for m in (ours, theirs))
    want = run(exact, torch.Tensor.double)
    least = 4 * torch.finfo(dtype).eps
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        assert rms(a - c) <= 2 * rms(b - c) + least * rms(c), f"result {k}"
