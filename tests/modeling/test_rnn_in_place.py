"""Tests changes in place between a forward and its backward: allowed wherever torch.nn's own code allows them.

torch saves a value only for a gradient that depends on it: an operand of a product for the gradient of the
weight, and a weight for the gradient of the operand."""

import weakref
from importlib import import_module

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

import flashcell
from cases import DEVICE
from gradients import unchecked
from torch_twins import EXACT, SEQUENCES, flatten, make_twins

I, D, B = 3, 4, 2
KINDS = {
    "LSTMCell": ("LSTMCell", {}),
    "GRUCell": ("GRUCell", {}),
    "RNNCell": ("RNNCell", {}),
    "LSTM": ("LSTM", {}),
    "GRU of 2 layers": ("GRU", {"num_layers": 2, "bias": False}),
    "RNN both ways": ("RNN", {"num_layers": 2, "bidirectional": True}),
    "LSTM both ways": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "LSTM with a projection": ("LSTM", {"proj_size": 2, "num_layers": 2}),
}
NEEDS = {  # which tensors need gradients, by name
    "all": lambda name: True,
    "parameters": lambda name: name[0] not in "xs",
    "input": lambda name: name == "x",
    "input and states": lambda name: name[0] in "xs",
    "all but the input's weights": lambda name: "weight_ih" not in name,
    "all but the recurrent weights": lambda name: "weight_hh" not in name,
    "biases": lambda name: "bias" in name,
    "second layer": lambda name: "_l1" in name,
    "second direction": lambda name: "_reverse" in name,
    "last state": lambda name: name == "s1",
}


def gradients_of(module, T, states, needs, changed=None):
    """Returns the gradients that are needed, with the tensor `changed` changed between the passes: None if
    autograd refuses, an empty list without gradients."""
    generator = torch.Generator("cpu").manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=EXACT, device="cpu").to(
        DEVICE
    )
    is_cell, pair = not hasattr(module, "mode"), "LSTM" in type(module).__name__
    first = not is_cell and module.batch_first
    leaves = {"x": draw(*((B, I) if is_cell else (B, T, I) if first else (T, B, I)))}
    rows = () if is_cell else (module.num_layers * (1 + module.bidirectional),)
    widths = [getattr(module, "proj_size", 0) or D, D][: 1 + pair]
    leaves |= {f"s{k}": draw(*rows, B, w) for k, w in enumerate(widths) if states}
    own = {n: t.requires_grad_(needs(n)) for n, t in leaves.items()}
    given = {n: t.clone() for n, t in own.items()}  # no leaves, which cannot be changed
    parameters = {n: p.requires_grad_(needs(n)) for n, p in module.named_parameters()}
    hx = tuple(t for n, t in given.items() if n != "x")
    y = flatten(module(given["x"], (hx if pair else hx[0]) if states else None))[0]
    sources = [t for t in (own | parameters).values() if t.requires_grad]
    if not y.requires_grad:
        return []
    if changed is not None:
        tensor = (given | parameters)[changed]
        with torch.no_grad():
            tensor.add_(1)
    try:
        return torch.autograd.grad(y.square().sum(), sources, allow_unused=True)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return None
    finally:
        if changed in parameters:
            with torch.no_grad():
                tensor.sub_(1)


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("name", KINDS)
def test_what_torch_allows(name, states, needs):
    kind, options = KINDS[name]
    theirs, ours = make_twins(kind, I, D, dtype=EXACT, backend=DEVICE, **options)
    names = ["x", *(n for n, _ in theirs.named_parameters()), *["s0", "s1"][: 2 * states]]
    if "LSTM" not in kind:
        names = [n for n in names if n != "s1"]
    for T in (1,) if kind.endswith("Cell") else (1, 3):
        call = T, states, NEEDS[needs]
        want = gradients_of(ours, *call)
        for changed in names:
            with (
                unchecked(),
                torch.backends.mkldnn.flags(enabled=False),
                torch.backends.cudnn.flags(enabled=False),
            ):
                allowed = gradients_of(theirs, *call, changed)
            found = gradients_of(ours, *call, changed)
            if allowed is not None:
                assert found is not None, f"T {T}: {changed} must not change"
            if found is not None:
                torch.testing.assert_close(found, want, msg=f"T {T}: {changed} is used")


@pytest.mark.parametrize("kind", SEQUENCES)
def test_packed(kind):
    _, ours = make_twins(kind, I, D, 2, dtype=EXACT, backend=DEVICE)
    data, sizes = torch.randn(5, I, dtype=EXACT), torch.tensor([3, 2], device="cpu")
    ours.weight_ih_l0.requires_grad_(False)
    sources = [p for p in ours.parameters() if p.requires_grad]
    found = []
    for change in (0, 1):
        y = ours(PackedSequence(data, sizes))[0].data
        data.add_(change)
        found.append(torch.autograd.grad(y.square().sum(), sources))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:create_graph=True")
def test_second_derivatives_need_all_values():
    _, ours = make_twins("GRU", I, D, dtype=EXACT, backend=DEVICE)
    x = torch.randn(3, B, I, dtype=EXACT)
    y = ours(x)[0].square().sum()
    with torch.no_grad():
        ours.bias_ih_l0.add_(1)
    torch.autograd.grad(y, ours.weight_hh_l0, retain_graph=True)
    with pytest.raises(RuntimeError, match="the input or a weight was changed in place after"):
        torch.autograd.grad(y, ours.weight_hh_l0, create_graph=True)


@pytest.mark.filterwarnings("ignore:create_graph=True")
@pytest.mark.parametrize("kind", SEQUENCES)
def test_what_only_second_derivatives_need_goes_with_the_graph(kind):
    """A loss that is kept after its backward keeps the node alive, but neither states nor biases."""
    _, cell = make_twins(f"{kind}Cell", I, D, dtype=EXACT, backend=DEVICE)
    state = torch.zeros(B, D, dtype=EXACT)
    alive = weakref.ref(state)
    loss = flatten(cell(torch.randn(B, I, dtype=EXACT), (state, state) if "L" in kind else state))[
        0
    ]
    loss = loss.square().sum()
    del state
    torch.autograd.grad(loss, cell.weight_hh, retain_graph=True)
    torch.autograd.grad(loss, cell.weight_hh, create_graph=True)
    assert alive() is not None
    loss.backward()
    assert alive() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, cell.weight_hh, create_graph=True)


def test_what_a_module_reads(fused_rnn):
    """A module that is trained never reads its biases' values, and w_ih for the gradient of x only."""
    unread = import_module(f"{fused_rnn.__name__}.unread").unread_places  # in x, *weights
    needs = (*(False,) * 3, False, *(True,) * 8)  # the first three are no tensors, then comes x
    assert unread(needs, 0, True, False, 1, True) == (1, 3, 4, 7, 8)
    assert unread(needs, 0, True, False, 1, False) == (1, 2, 3, 4, 6, 7, 8)  # both R of zeros


def test_a_failed_backward_may_be_run_again(monkeypatch):
    kernel = flashcell.load_kernel("fused-rnn", DEVICE)
    layers_op = kernel.run_layers.__globals__  # another test may have imported the module anew
    _, ours = make_twins("GRU", I, D, dtype=EXACT, backend=DEVICE)
    ours.weight_ih_l0.requires_grad_(False)
    loss = ours(torch.randn(3, B, I, dtype=EXACT))[0].sum()
    with monkeypatch.context() as patch:
        patch.setitem(layers_op, "run_each", None)
        patch.setitem(layers_op, "any_batched", lambda *_: True)
        with pytest.raises(TypeError):
            loss.backward()
    loss.backward()
    assert ours.weight_hh_l0.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_an_input_of_inference_mode_is_trained_on(kind):
    """torch.nn's forward copies it with batch_first, and refuses it otherwise."""
    _, ours = make_twins(kind, I, D, dtype=EXACT, backend=DEVICE)
    with torch.inference_mode():
        x = torch.randn(*(() if "Cell" in kind else (3,)), B, I, dtype=EXACT)
    found = []
    for given in (x, x.clone()):
        ours.zero_grad()
        sum(t.sum() for t in flatten(ours(given))).backward()
        found.append([p.grad.clone() for p in ours.parameters()])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
