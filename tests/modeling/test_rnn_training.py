"""Tests training of the stand-ins with gradients changed in place: torch.nn's weights, step for
step.

Clipping, unscaling, accumulation and zero_grad(set_to_none=False) change gradients in place. Two
gradients in the same memory then train a model wrongly, although every comparison of gradients
passes.
"""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from gradients import overlapping
from model_cases import CASES
from numerics import EPS, assert_close
from torch_twins import CELLS, EXACT, flatten, make_twins

STEPS, WIDTH, HIDDEN = 20, 5, 6
SAME = 1e-10 if DEVICE == "cpu" else 2**10 * EPS[EXACT]  # after 20 steps, in float64 or float32
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
if DEVICE == "cuda":
    DTYPES.remove(torch.float64)


@pytest.fixture(autouse=True)
def without_tf32():
    """torch lets cuDNN round the products of float32 to 10 bits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def clip(module, loss):
    loss(0).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def accumulate(module, loss):
    for k in range(3):
        loss(k).backward()


def unscale(module, loss):
    """Does what GradScaler does, which refuses float64."""
    (1024 * loss(0)).backward()
    grads = [p.grad for p in module.parameters()]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([1 / 1024]))


def keep(module, loss):
    """Keeps gradients as the same tensors from step to step."""
    loss(0).backward()
    loss(1).backward()


WAYS = {way.__name__: way for way in (clip, accumulate, unscale, keep)}
MODULES = {
    "lstm": ("LSTM", {}),
    "lstm-layers": ("LSTM", {"num_layers": 3, "batch_first": True}),
    "lstm-bidirectional": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "lstm-projected": ("LSTM", {"proj_size": 3, "num_layers": 2}),
    "lstm-projected-bidirectional": ("LSTM", {"proj_size": 3, "bidirectional": True}),
    "lstm-no-bias": ("LSTM", {"bias": False}),
    "gru": ("GRU", {}),
    "gru-layers": ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "tanh": ("RNN", {}),
    "tanh-bidirectional": ("RNN", {"num_layers": 2, "bidirectional": True}),
    "relu": ("RNN", {"nonlinearity": "relu", "num_layers": 2}),
    "lstm-cell": ("LSTMCell", {}),
    "gru-cell": ("GRUCell", {}),
    "rnn-cell": ("RNNCell", {}),
    "rnn-cell-relu": ("RNNCell", {"nonlinearity": "relu"}),
}


def run(module, x, lengths=None):
    """Returns outputs and last states; a cell runs its steps one by one."""
    if not isinstance(module, nn.RNNBase):
        hx, outputs = None, []
        for row in x:
            hx = module(row, hx)
            outputs.append(flatten(hx)[0])
        return [torch.stack(outputs), *flatten(hx)]
    if lengths is not None:
        x = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
    return flatten(module(x))


def train(module, way, lengths):
    draw = torch.Generator(DEVICE).manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        batches = torch.randn(3, 4, 4, WIDTH, generator=draw, dtype=EXACT)  # T = B: any layout fits
        loss = lambda k, given=batches: sum(
            o.square().mean() for o in run(module, given[k], lengths)
        )
        way(module, loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=way is not keep)
    return {name: p.detach() for name, p in module.named_parameters()}


PACKED = ["lstm", "lstm-layers", "gru-layers", "tanh"]
RUNS = [(name, None) for name in MODULES] + [(name, [4, 1, 3, 2]) for name in PACKED]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "lengths"), RUNS, ids=lambda v: v if isinstance(v, str) else v and "packed"
)
def test_trains_as_torch(fused_rnn, name, lengths, way):
    kind, options = MODULES[name]
    twins = make_twins(kind, WIDTH, HIDDEN, **options, dtype=EXACT)
    want, got = (train(twin, WAYS[way], lengths) for twin in twins)
    for parameter, value in want.items():
        assert_close(parameter, got[parameter], value, SAME)


def assert_separate(leaves: dict[str, torch.Tensor]) -> None:
    """Asserts that changing one gradient changes no other."""
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert grads
    assert overlapping(grads.items()) is None
    before = {name: grad.clone() for name, grad in grads.items()}
    for name, grad in grads.items():
        grad.fill_(7)
        wrong = [n for n, g in grads.items() if n != name and not torch.equal(g, before[n])]
        assert not wrong, f"changing {name}'s gradient changed {wrong}"
        grad.copy_(before[name])


def differentiate(module, dtype, run=None) -> dict[str, torch.Tensor]:
    """Returns the leaves of a call: parameters, input and states."""
    rows = 1 if not isinstance(module, nn.RNNBase) else 2 if module.bidirectional else 1
    rows *= getattr(module, "num_layers", 1)
    x = torch.randn(4, 3, WIDTH, dtype=dtype, requires_grad=True)
    widths = [getattr(module, "proj_size", 0) or HIDDEN, HIDDEN]
    hx = [torch.randn(rows, 3, width, dtype=dtype, requires_grad=True) for width in widths]
    if not isinstance(module, nn.RNNBase):
        hx = [s.detach()[0].requires_grad_() for s in hx]
    pair = "LSTM" in type(module).__name__
    given = x if isinstance(module, nn.RNNBase) else x[0]
    outputs = flatten((module if run is None else run)(given, tuple(hx) if pair else hx[0]))
    sum(o.float().sum() for o in outputs).backward()
    leaves = {"x": x, **{f"hx[{k}]": s for k, s in enumerate(hx)}}
    return leaves | dict(module.named_parameters())


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_are_separate(fused_rnn, kind, dtype, backend):
    projected = [0, 3] if kind == "LSTM" else [0]
    for layers, both, size, bias in product((1, 2), (False, True), projected, (True, False)):
        options = {"num_layers": layers, "bidirectional": both, "bias": bias, "dtype": dtype}
        options |= {"proj_size": size} if size else {}
        module = getattr(flashcell, kind)(WIDTH, HIDDEN, **options, backend=backend)
        assert_separate(differentiate(module, dtype))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_of_cells_are_separate(fused_rnn, kind, dtype, backend):
    module = getattr(flashcell, kind)(WIDTH, HIDDEN, dtype=dtype, backend=backend)
    assert_separate(differentiate(module, dtype))


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "RNNCell"])
def test_compiled_gradients_are_separate(fused_rnn, kind, compiler):
    """A compiled backward may return one buffer as several tensors."""
    module = getattr(flashcell, kind)(WIDTH, HIDDEN)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, fullgraph=True, backend=compiler)
        assert_separate(differentiate(module, torch.float32, compiled))


@pytest.mark.parametrize("kind", ["LSTM", "GRUCell"])
def test_compiled_autograd(fused_rnn, kind):
    """It compiles what the graph of a call that was not compiled consists of."""
    twins, found = make_twins(kind, WIDTH, HIDDEN, dtype=torch.float32), []
    x = torch.randn(*(() if "Cell" in kind else (5,)), 3, WIDTH)
    for module in twins:
        torch._dynamo.reset()
        run = lambda: sum(o.sum() for o in flatten(module(x))).backward()  # noqa: B023
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(run, backend="eager")()
        found.append(dict(module.named_parameters()))
    for name, want in found[0].items():
        assert_close(name, found[1][name].grad, want.grad, 64 * EPS[torch.float32])


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_models_are_separate(make_model, tokens, case):
    model, ids = make_model(case), tokens(2, 7)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    assert_separate({"inputs_embeds": embeds, **dict(model.named_parameters())})


def test_frozen_and_shared_parameters_train_as_torch(fused_rnn):
    """A bias that two layers share gets the sum of both gradients; a frozen one gets none."""
    twins = make_twins("LSTM", WIDTH, HIDDEN, 2, dtype=EXACT)
    for twin in twins:
        twin.bias_hh_l1 = twin.bias_ih_l1
        twin.bias_ih_l0.requires_grad_(False)
    want, got = (train(twin, clip, None) for twin in copy.deepcopy(twins))
    for parameter, value in want.items():
        assert_close(parameter, got[parameter], value, SAME)
