"""Tests second derivatives through dropout between layers: they are those of the mask that was drawn."""

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flashcell
from cases import DEVICE
from torch_twins import EXACT, SEQUENCES, flatten

I, D, B, T = 3, 4, 2, 5
FORMS = {
    "3 layers": {"num_layers": 3},
    "both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "a projection": {"num_layers": 2, "proj_size": 2},
    "all dropped": {"num_layers": 2, "dropout": 1.0},
}
pytestmark = pytest.mark.filterwarnings("ignore:create_graph=True")


@pytest.fixture(autouse=True)
def without_tf32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def by_layers(module, x, hx, seed):
    """What `module` computes, by torch.nn's modules of one layer each and dropout between them."""
    names = ["batch_first", "bidirectional", *["proj_size"] * (module.mode == "LSTM")]
    options = {name: getattr(module, name) for name in names}
    kind, N = getattr(nn, module.mode[:4].partition("_")[0]), 1 + module.bidirectional
    outer = N * (getattr(module, "proj_size", 0) or D)
    widths = [I, *[outer] * (module.num_layers - 1)]
    layers = [kind(width, D, dtype=EXACT, **options) for width in widths]
    pair, lasts, y = module.mode == "LSTM", [], x
    torch.manual_seed(seed)
    for number, layer in enumerate(layers):
        if number > 0:
            y = drop(y, module)
        marked = f"_l{number}"
        given = {k.replace(marked, "_l0"): w for k, w in module.named_parameters() if marked in k}
        rows = slice(number * N, (number + 1) * N)
        states = tuple(s[rows] for s in hx) if pair else hx[rows]
        y, last = torch.func.functional_call(layer, given, (y, states))
        lasts.append(last)
    return y, tuple(map(torch.cat, zip(*lasts, strict=True))) if pair else torch.cat(lasts)


def drop(y, module):
    """Drops as the kernels do, which go through the elements batch by batch."""
    if isinstance(y, PackedSequence):
        return y._replace(data=nn.functional.dropout(y.data, module.dropout))
    first = y if module.batch_first else y.transpose(0, 1)
    y = nn.functional.dropout(first.contiguous(), module.dropout)
    return y if module.batch_first else y.transpose(0, 1)


def both_gradients(run, leaves):
    loss = sum(t.square().sum() for t in flatten(run()))
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return grads, torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_are_those_of_the_mask(kind, form, packed):
    options = {"dropout": 0.4, **FORMS[form]}
    if "proj_size" in options and kind != "LSTM":
        pytest.skip("torch.nn's LSTM alone has projections")
    if "proj_size" in options and packed:
        pytest.skip("drops in a padded tensor, by torch's own function")
    module = getattr(flashcell, kind)(I, D, dtype=EXACT, backend=DEVICE, **options)
    x = torch.randn(*((B, T) if module.batch_first else (T, B)), I, dtype=EXACT, requires_grad=True)
    N = 1 + module.bidirectional
    widths = [getattr(module, "proj_size", 0) or D, D][: 1 + (kind == "LSTM")]
    hx = tuple(
        torch.randn(module.num_layers * N, B, w, dtype=EXACT, requires_grad=True) for w in widths
    )
    pack = lambda x: pack_padded_sequence(x, [5, 3], batch_first=module.batch_first)
    state = hx if kind == "LSTM" else hx[0]

    def ours():
        torch.manual_seed(1)
        return module(pack(x) if packed else x, state)

    def theirs():
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            return by_layers(module, pack(x) if packed else x, state, 1)

    bound = {"rtol": 1e-9, "atol": 1e-9} if DEVICE == "cpu" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(flatten(ours()), flatten(theirs()), **bound)
    leaves = (x, *hx, *module.parameters())
    got, want = both_gradients(ours, leaves), both_gradients(theirs, leaves)
    torch.testing.assert_close(got, want, **bound)


@pytest.mark.skipif(DEVICE == "cuda", reason="fp64 on CUDA runs cuDNN, which refuses")
def test_numerically():
    module = flashcell.GRU(I, D, 2, dropout=0.5, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)

    def run(x, *parameters):
        torch.manual_seed(2)
        given = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return flatten(torch.func.functional_call(module, given, (x,)))

    assert gradgradcheck(run, (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("form", ["3 layers", "both ways"])
def test_by_the_cells_ops(fused_rnn, form):
    """What runs the layers again on CUDA takes the masks as torch's functions do."""
    second_order = import_module(f"{fused_rnn.__name__}.second_order")
    module = flashcell.LSTM(I, D, **FORMS[form])
    L, N = module.num_layers, 1 + module.bidirectional
    x = torch.randn(*((B, T) if module.batch_first else (T, B)), I)
    masks = [torch.rand(B, T, N * D) < 0.6 for _ in range(L - 1)]
    options = (), True, False, N, module.batch_first, D, 0.4, False
    call = "lstm", 4, x, list(torch.randn(2, L * N, B, D)), list(module.parameters()), options
    with second_order._plain_torch():
        want, last = second_order.run(*call, masks)
        without, _ = second_order.run(*call)
    got, own = second_order.run_cells(*call, masks)
    torch.testing.assert_close([got, *own], [want, *last])
    assert not torch.allclose(want, without)


@pytest.mark.parametrize("steps", [4, 5])
def test_masks_of_layers_side_by_side(fused_rnn, steps):
    """On CUDA a mask is of a wave: of a chunk of each layer, one earlier for each layer above. The first
    steps, which fill no chunk, have one for each layer."""
    wavefront = import_module(f"{fused_rnn.__name__}.wavefront")
    L, chunk, P = 3, 2, 8
    rest, chunks = steps % chunk, steps // chunk
    want = [torch.rand(B, steps, D) < 0.5 for _ in range(L - 1)]
    kept = [torch.zeros(B * rest, L, P, dtype=torch.bool) for _ in range(L - 1 if rest else 0)]
    kept += [torch.zeros(B * chunk, L, P, dtype=torch.bool) for _ in range(chunks + L - 2)]
    for layer, mask in enumerate(want):
        head = L - 1 - layer
        if rest:
            kept[layer][:, head, :D] = mask[:, :rest].reshape(-1, D)
        for c in range(chunks):
            begin, wave = rest + c * chunk, len(kept) - (chunks + L - 2) + layer + c
            kept[wave][:, head, :D] = mask[:, begin : begin + chunk].reshape(-1, D)
    got = wavefront.masks_of_chunks(kept, L, B, steps, D, chunk)
    assert all(map(torch.equal, got, want))
