"""Tests flashcell.LSTM, GRU, RNN against torch.nn's with the same parameters: every option, every
gradient."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import flashcell
from cases import DEVICE
from flashcell.kernels.fused_rnn import stack
from numerics import assert_as_accurate, assert_bitwise, assert_close
from torch_twins import (
    EXACT,
    SAME,
    SEQUENCES,
    assert_same,
    compute,
    flatten,
    make_inputs,
    make_twins,
    outputs,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")

BACKENDS = ["auto", "reference"]
LENGTHS = [2, 5, 1, 5]


@pytest.fixture(autouse=True)
def without_tf32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def options(kind: str):
    """All combinations of options that select another code path."""
    projections = [{}, {"proj_size": 3}] if kind == "LSTM" else [{}]
    if kind == "RNN":
        projections = [{"nonlinearity": name} for name in ("tanh", "relu")]
    switches = ("bidirectional", "batch_first", "bias")
    for values in product((False, True), repeat=len(switches)):
        for layers, extra in product((1, 3), projections):
            yield {**dict(zip(switches, values, strict=True)), "num_layers": layers, **extra}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("shape", ["batched", "unbatched", "packed"])
def test_every_option_is_torch(kind, backend, shape):
    for states, kwargs in product((False, True), options(kind)):
        theirs, ours = make_twins(kind, 6, 8, dtype=EXACT, backend=backend, **kwargs)
        x, hx = make_inputs(ours, None if shape == "unbatched" else 4, states=states)
        lengths = LENGTHS if shape == "packed" else None
        got, want = (compute(module, x, hx, lengths) for module in (ours, theirs))
        assert_same(got, want, SAME, kwargs)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("shape", ["batched", "packed"])
def test_batched_products(kind, shape, monkeypatch):
    """The path that CUDA takes: both directions in one product."""
    monkeypatch.setattr(stack, "LINEAR_DEVICES", ())
    test_every_option_is_torch(kind, "auto", shape)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize(("batch", "T"), [(1, 1), (3, 1), (1, 6), (0, 4)])
def test_small_shapes(kind, batch, T):
    for kwargs in ({}, {"num_layers": 2, "bidirectional": True}):
        theirs, ours = make_twins(kind, 5, 7, dtype=EXACT, **kwargs)
        x, hx = make_inputs(ours, batch, T)
        assert_same(compute(ours, x, hx), compute(theirs, x, hx), SAME, kwargs)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_as_accurate_as_torch(kind, dtype, packed):
    """Our errors against torch.nn in float64 are as small as those of torch.nn in the same dtype."""
    extra = [{}, {"proj_size": 8}] if kind == "LSTM" else [{}]
    for kwargs in extra:
        theirs, ours = make_twins(
            kind, 24, 32, num_layers=2, bidirectional=True, dtype=dtype, **kwargs
        )
        x, hx = make_inputs(ours, 4, 9)
        lengths = [9, 7, 7, 2] if packed else None
        got, peer = (compute(module, x, hx, lengths) for module in (ours, theirs))
        hx = hx.double() if torch.is_tensor(hx) else tuple(s.double() for s in hx)
        exact = compute(theirs.double(), x.double(), hx, lengths)
        for name, want in exact.items():
            assert got[name].dtype == dtype
            assert_as_accurate(f"{kwargs} {name}", got[name], want, peer[name], terms=32)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_packed_keeps_the_order(kind):
    """sorted_indices, unsorted_indices and batch_sizes are returned, and states are in the caller's
    order."""
    theirs, ours = make_twins(kind, 6, 8, 2, bidirectional=True, dtype=EXACT)
    x, hx = make_inputs(ours, 4)
    for lengths, enforce_sorted in ((LENGTHS, False), (sorted(LENGTHS)[::-1], True)):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
        got, want = ours(packed, hx)[0], theirs(packed, hx)[0]
        assert isinstance(got, PackedSequence)
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            found, wanted = getattr(got, name), getattr(want, name)
            assert found is wanted or torch.equal(found, wanted), name
        sums = [compute(m, x, hx, lengths, enforce_sorted) for m in (ours, theirs)]
        assert_same(*sums, SAME)
    one = pack_sequence([torch.randn(3, 6, dtype=EXACT)])
    assert_same(*({"y": m(one)[0].data.detach()} for m in (ours, theirs)), SAME)
    if kind == "LSTM":  # of an order that is to be restored, torch takes the first two states
        packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        for given in (torch.stack(hx), (*hx, None)):
            assert_same(*({"y": m(packed, given)[0].data.detach()} for m in (ours, theirs)), SAME)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_dropout(kind):
    """Dropout acts between the layers, in training only, and scales what it keeps."""
    theirs, ours = make_twins(kind, 6, 8, 2, dropout=1.0, dtype=EXACT)
    x, hx = make_inputs(ours, 3)
    assert_same(compute(ours, x, hx), compute(theirs, x, hx), SAME)

    ours.dropout = 0.5
    layers = [getattr(flashcell, kind)(width, 8, dtype=EXACT) for width in (6, 8)]
    for name, value in ours.state_dict().items():
        getattr(layers[int(name[-1])], name[:-1] + "0").data.copy_(value)
    torch.manual_seed(1)
    got = ours(x)[0]
    torch.manual_seed(1)
    between = layers[0](x)[0].transpose(0, 1)
    want = layers[1](nn.functional.dropout(between.contiguous(), 0.5).transpose(0, 1))[0]
    assert_bitwise("with the same mask", got, want)

    theirs.eval(), ours.eval()
    assert_same(compute(ours, x, hx), compute(theirs, x, hx), SAME)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_dropout_in_a_transform(kind):
    """torch.func's transforms run the layers as single ops; dropout acts between these layers too."""
    theirs, ours = make_twins(kind, 6, 8, 2, dropout=1.0, dtype=EXACT)
    x, _ = make_inputs(ours, 3)
    last = lambda module: lambda x: module(x)[1]
    got, _ = torch.func.vjp(last(ours), x.detach())
    want = theirs(x)[1]
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for k, (a, b) in enumerate(pairs):
        assert_same({k: a.detach()}, {k: b.detach()}, SAME)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_autocast(kind, given, packed):
    """Outputs and states are in autocast's dtype, as cuDNN's are; gradients in the parameters'.

    torch has nn.LSTM's bf16 on a CPU from oneDNN, which refuses one without AVX-512.
    """
    theirs, ours = make_twins(kind, 24, 32, 2)
    x, hx = make_inputs(ours, 4, 9)
    x, lengths = x.to(given), [9, 7, 7, 2] if packed else None
    with torch.autocast(DEVICE, torch.bfloat16):
        got = compute(ours, x, hx, lengths)
        as_cudnn = DEVICE == "cuda" or (kind != "GRU" and not packed)
        if DEVICE == "cpu" and kind == "LSTM":
            as_cudnn &= torch.ops.mkldnn._is_mkldnn_bf16_supported()
        peer = compute(theirs, x, hx, lengths) if as_cudnn else None
    hx = hx.double() if torch.is_tensor(hx) else tuple(s.double() for s in hx)
    exact = compute(theirs.double(), x.double(), hx, lengths)
    for name, want in exact.items():
        dtype, tolerance = torch.float32, 0.03  # observed over 10 seeds: at most 0.016, torch 0.019
        if name.startswith("output"):
            dtype, tolerance = torch.bfloat16, 0.015  # observed: 0.0075 for both
            assert peer is None or peer[name].dtype == dtype
        assert got[name].dtype == (given if name == "d x" else dtype)
        assert_close(name, got[name], want, tolerance)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_inputs_of_any_strides(kind):
    theirs, ours = make_twins(kind, 6, 8, 2, bidirectional=True, dtype=EXACT)
    x, hx = make_inputs(ours, 4)
    wide = lambda t: torch.stack((t, t), -1)[..., 0]
    hx = wide(hx) if torch.is_tensor(hx) else tuple(map(wide, hx))
    for strided in (wide(x), x.transpose(0, 1).contiguous().transpose(0, 1)):
        outputs = [flatten(module(strided, hx)) for module in (ours, theirs)]
        for got, want in zip(*outputs, strict=True):
            assert got.is_contiguous()
            assert_close("output", got, want, SAME)


def outcome(function, *args):
    try:
        return [t.shape for t in flatten(function(*args))]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_errors_are_torch_s(kind):
    twins = make_twins(kind, 4, 8, 2)
    state = lambda *shape: (torch.randn(shape),) * 2 if kind == "LSTM" else torch.randn(shape)
    calls = [
        (torch.randn(5, 3, 5),),
        (torch.randn(5, 3, 4).double(),),
        (torch.randn(4),),
        (torch.randn(1, 5, 3, 4),),
        (torch.randn(0, 3, 4),),
        (torch.randn(5, 3, 4), state(2, 3, 7)),
        (torch.randn(5, 3, 4), state(1, 3, 8)),
        (torch.randn(5, 3, 4), state(2, 8)),
        (torch.randn(5, 4), state(2, 3, 8)),
        (torch.randn(5, 4), state(2, 8)),
    ]
    for call in calls:
        theirs, ours = (outcome(module, *call) for module in twins)
        assert ours == theirs
    packed = pack_sequence([torch.randn(3, 5)])
    with pytest.raises(RuntimeError, match="Expected 4, got 5"):  # nn.LSTM does not check this
        twins[1](packed)
    with pytest.raises(ValueError, match="backend is 'gpu', but must be one of auto, cuda, cpu"):
        getattr(flashcell, kind)(4, 8, backend="gpu")
    other = {"cpu": "cuda", "cuda": "cpu"}[DEVICE]
    module = getattr(flashcell, kind)(4, 8, backend=other)
    with pytest.raises(ValueError, match=f"backend is '{other}', but the tensors are on"):
        module(torch.randn(5, 3, 4))


def test_second_derivatives_of_the_reference():
    ours = flashcell.LSTM(2, 3, 2, bidirectional=True, dtype=torch.float64, backend="reference")
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x)[0], (x,))


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("batch", [3, None])
def test_num_layers_set_later(kind, packed, batch):
    """As many layers run as the attribute says, as of oneDNN's LSTM; for more there are no weights."""
    _, ours = make_twins(kind, 6, 8, 3, bidirectional=True, dtype=EXACT, backend="cpu")
    few = getattr(flashcell, kind)(6, 8, 2, bidirectional=True, dtype=EXACT, backend="cpu")
    few.load_state_dict(ours.state_dict(), strict=False)
    ours.num_layers = 2
    if packed and batch is None:
        pytest.skip("a packed sequence has a batch")
    for states in (False, True):
        x, hx = make_inputs(few, batch, states=states)
        given = pack_padded_sequence(x, [5, 5, 2]) if packed else x
        found, wanted = outputs(ours, given, hx), outputs(few, given, hx)
        assert found.keys() == wanted.keys()
        for k, want in wanted.items():
            assert_bitwise(f"output {k}", found[k], want)
    ours.num_layers = 4
    with pytest.raises(RuntimeError, match="Expected more weights in stacked_rnn: num_layers is 4"):
        ours(pack_padded_sequence(x, [5, 5, 2]) if packed else x)
