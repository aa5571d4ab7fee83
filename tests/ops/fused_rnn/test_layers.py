"""Tests the ops that run all layers of a module at once: how they are registered, and what only they
have. tests/modeling compares what they compute with torch.nn."""

import resource
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashcell
from cases import DEVICE
from numerics import EPS, assert_bitwise, assert_close

CALLS = {
    "plain": {},
    "stacked": {"layers": 3, "bias": False},
    "both directions": {"layers": 2, "directions": 2, "states": True},
    "padded": {"layers": 2, "width": 8, "batch_first": True},
    "packed": {"layers": 2, "directions": 2, "batch_sizes": (3, 3, 2, 1), "states": True},
    "cast": {"layers": 2, "dtype": torch.bfloat16},
    "dropped out": {"layers": 2, "dropout": 0.5},
    "one step": {"T": 1, "layers": 2},
    "cell": {"T": 0},
    "cell with states": {"T": 0, "states": True, "dtype": torch.bfloat16},
}


def make(gates, K, I=3, D=5, B=3, T=4, layers=1, directions=1, bias=True, states=False, width=0,
         batch_first=False, batch_sizes=(), dtype=torch.float32, dropout=0.0, O=0):  # fmt: skip
    """Returns x, the states, the weights and the options of a call; T = 0 makes that of a cell."""
    r = lambda *shape, dtype=torch.float32: torch.randn(shape, dtype=dtype, device=DEVICE) / 2
    if batch_sizes:
        x = r(sum(batch_sizes), I, dtype=dtype)
    else:
        x = r(*((B, T) if batch_first else (T, B)) if T else (B,), I, dtype=dtype)
    weights = []
    for layer in range(layers):
        shapes = (gates * D, directions * (O or D) if layer else I), (gates * D, O or D)
        shapes += ((gates * D,), (gates * D,)) if bias else ()
        shapes += ((O, D),) if O else ()
        weights += [r(*shape) for _ in range(directions) for shape in shapes]
    sizes = (layers * directions, B) if T else (B,)
    state = [r(*sizes, D if k else O or D) for k in range(K if states else 0)]
    options = batch_sizes, bias, O > 0, directions, batch_first, width or D, dropout, False
    return x, state, weights, options


PROJECTED = {
    "projected": {"layers": 2, "directions": 2, "O": 2, "states": True},
    "projected and padded": {"O": 3, "width": 8},
}


@pytest.mark.parametrize(
    ("name", "call"), [*product(["lstm", "gru"], CALLS), *product(["lstm"], PROJECTED)]
)
def test_opcheck(fused_rnn, name, call):
    cell = fused_rnn.CELLS[name]
    x, state, weights, options = make(cell.gates, cell.states, **(CALLS | PROJECTED)[call])
    given = [t.requires_grad_() for t in (x, *state, *weights)]
    op = getattr(fused_rnn.dispatch.ops, f"{name}_layers_fwd").default
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    if call in ("plain", "stacked"):  # others keep weights with gaps, which nothing writes
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (x, state, weights, *options, True, 0), test_utils=checks)
    with torch.no_grad():
        y, last, kept = op(x, state, weights, *options, True, 0)
        backward = getattr(fused_rnn.dispatch.ops, f"{name}_layers_bwd").default
        call = (y, last, x, weights, kept, *options, True, bool(state), 0)
    torch.library.opcheck(backward, call, test_utils=["test_schema", "test_faketensor"])
    assert len(given) == 1 + len(state) + len(weights)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # weights are cast to x's
def test_padded_units_change_nothing(fused_rnn, name, directions, dtype):
    cell = fused_rnn.CELLS[name]
    call = {"layers": 3, "directions": directions, "states": True, "dtype": dtype}
    if dtype == torch.bfloat16:
        call |= {"batch_first": True, "bias": False}
    x, state, weights, options = make(cell.gates, cell.states, **call)
    given = [t.requires_grad_() for t in (x, *state, *weights)]
    found = []
    for width in (5, 8):
        padded = (*options[:5], width, *options[6:])
        y, last = fused_rnn.run_layers(name, x, state, weights, padded)
        loss = sum((t.square() * (k + 1)).sum() for k, t in enumerate((y, *last)))
        found.append([y, *last, *torch.autograd.grad(loss, given)])
        with torch.no_grad():
            y, last = fused_rnn.run_layers(name, x, state, weights, padded)
        found[-1] += [y, *last]
    for padded, plain in zip(*reversed(found), strict=True):
        assert_close("padded", padded, plain, 16 * EPS[dtype])


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("directions", [1, 2])
def test_sequences_of_one_length_are_a_batch(fused_rnn, name, directions):
    """A PackedSequence of sequences that are all as long as the batch gives the batch's bits."""
    cell = fused_rnn.CELLS[name]
    x, state, weights, options = make(
        cell.gates, cell.states, layers=2, directions=directions, states=True
    )
    given = [t.requires_grad_() for t in (x, *state, *weights)]
    results = []
    for data, sizes in ((x, ()), (x.flatten(0, 1), (3,) * 4)):
        y, last = fused_rnn.run_layers(name, data, state, weights, (sizes, *options[1:]))
        loss = y.square().sum() + sum(s.sum() for s in last)
        results.append([y.flatten(0, -2), *last, *torch.autograd.grad(loss, given)])
    for packed, batch in zip(*results, strict=True):
        assert_close("packed", packed, batch, 8 * EPS[torch.float32])


def test_dropout_keeps_what_its_mask_says(fused_rnn):
    """With a probability of 1 the second layer reads zeros, so that the first one has no gradient."""
    x, state, weights, options = make(4, 2, layers=2, dropout=1.0)
    given = [w.requires_grad_() for w in weights]
    y, _ = fused_rnn.run_layers("lstm", x, state, weights, options)
    zero = torch.zeros(4, 3, 5, device=DEVICE)
    second, _ = fused_rnn.run_layers("lstm", zero, [], weights[4:], (*options[:6], 0.0, False))
    assert_bitwise("output", y, second)
    grads = torch.autograd.grad(y.sum(), given)
    assert all(not grad.any() for grad in grads[:4])
    assert all(grad.any() for grad in (grads[5], *grads[6:]))


BAD = {
    "x": (lambda c: {**c, "x": c["x"][None]}, r"x must be \[T, B, I\]"),
    "cell": (lambda c: {**c, "x": c["x"][0], "directions": 2, "weights": 2 * c["weights"]},
             r"x must be \[B, T, I\] or \[T, B, I\] for several layers, directions"),
    "empty": (lambda c: {**c, "x": c["x"][:0]}, "x must not be empty"),
    "directions": (lambda c: {**c, "directions": 3}, "directions must be 1 or 2, got 3"),
    "count": (lambda c: {**c, "weights": c["weights"][:3]}, "weights must be 4 for each"),
    "shape": (lambda c: {**c, "weights": [w[1:] for w in c["weights"]]}, r"weights\[0\] must have"),
    "dtype": (lambda c: {**c, "x": c["x"].half(), "weights": [w.bfloat16() for w in c["weights"]]},
              r"weights\[0\] must have dtype Float"),
    "states": (lambda c: {**c, "state": [c["x"]]}, "state must be 2 tensors or none, got 1"),
    "width": (lambda c: {**c, "width": 4}, "width must be from 5"),
    "dropout": (lambda c: {**c, "dropout": 1.5}, "dropout must be from 0 to 1, got 1.5"),
    "increasing": (lambda c: {**c, "x": c["x"][0], "batch_sizes": (1, 2)}, "never increase"),
    "sum": (lambda c: {**c, "x": c["x"][0], "batch_sizes": (2, 2)}, "sum up to the rows of x, 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused(fused_rnn, what):
    x, state, weights, _ = make(4, 2)
    call = {"x": x, "state": state, "weights": weights, "batch_sizes": (), "bias": True}
    call |= {
        "projects": False,
        "directions": 1,
        "batch_first": False,
        "width": 5,
        "dropout": 0.0,
        "tf32": False,
    }
    change, says = BAD[what]
    with pytest.raises(RuntimeError, match=says):
        fused_rnn.dispatch.ops.lstm_layers_fwd(*change(call).values(), False, 0)


class Counter(TorchDispatchMode):
    def __init__(self):
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kwargs", [{}, {"num_layers": 3, "bidirectional": True, "dropout": 0.1}])
def test_a_call_of_a_module_is_one_op(kwargs):
    module = flashcell.LSTM(8, 16, device=DEVICE, backend=DEVICE, **kwargs)
    x = torch.randn(4, 2, 8, device=DEVICE)
    with torch.no_grad(), Counter() as inference:
        module(x)
    assert inference.names == ["lstm_layers_fwd.default"]
    with Counter() as training:
        y, _ = module(x)
    assert training.names[0] == "lstm_layers_fwd.default"
    assert set(training.names[1:]) <= {"detach.default"}
    dy = torch.ones_like(y)
    with Counter() as backward:
        y.backward(dy)
    assert [n for n in backward.names if n != "detach.default"] == ["lstm_layers_bwd.default"]


@pytest.mark.parametrize("with_state", [False, True])
def test_a_call_of_a_cell_is_one_op(with_state):
    module = flashcell.LSTMCell(8, 16, device=DEVICE, backend=DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    state = tuple(torch.randn(4, 16, device=DEVICE) for _ in range(2)) if with_state else None
    with torch.no_grad(), Counter() as inference:
        module(x, state)
    assert inference.names == ["lstm_cell_fwd.default"]
    with Counter() as training:
        h, c = module(x, state)
    assert [n for n in training.names if n != "detach.default"] == ["lstm_cell_train_fwd.default"]
    loss = h.sum() + c.sum()
    with Counter() as backward:
        loss.backward()
    assert "lstm_cell_bwd.default" in backward.names
    assert module.weight_hh.grad.any().item() == with_state


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("with_state", [False, True])
def test_one_step_is_a_sequence_of_one(name, with_state, fused_rnn):
    """A cell's call, x [B, I], is that of a module with T = 1, also for its gradients."""
    cell = fused_rnn.CELLS[name]
    x, state, weights, options = make(cell.gates, cell.states, T=1, B=33, states=with_state)
    given = [t.requires_grad_() for t in (x, *state, *weights)]
    y, last = fused_rnn.run_layers(name, x, state, weights, options)
    h, last_of_cell = fused_rnn.run_layers(name, x[0], [s[0] for s in state], weights, options)
    assert h.equal(y[0])
    assert all(a.equal(b[0]) for a, b in zip((h, *last_of_cell), last, strict=True))
    loss = lambda y, last: y.square().sum() + (y, *last)[-1].square().sum()
    grads, of_cell = (
        torch.autograd.grad(loss(y, last), given),
        torch.autograd.grad(loss(h, last_of_cell), given),
    )
    assert all(a.equal(b) for a, b in zip(grads, of_cell, strict=True))


# Rows with whole vectors and without, two columns of thread blocks, sums in two parts; tensor cores,
# which read 16, 8 and 4 bytes at once; cuBLAS.
TINY = [(1, 9, 11), (11, 16, 16), (5, 1030, 11), (300, 9, 11), (1030, 16, 16)]
TINY += [(9, 12, 20), (70, 18, 22), (1030, 301, 91)]


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.skipif(DEVICE != "cuda", reason="about kernels on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_tiny_one_step(fused_rnn, name, shape, dtype):
    """Runs every kernel of a cell's call and of its gradients, for scripts/check_cuda."""
    cell = fused_rnn.CELLS[name]
    B, I, D = shape
    for states in (False, True):
        *given, options = make(cell.gates, cell.states, I=I, D=D, B=B, T=0, states=states)
        x, state, weights = given[0].to(dtype), *([t.to(dtype) for t in ts] for ts in given[1:])
        with torch.no_grad():
            h, last = fused_rnn.run_layers(name, x, state, weights, options)
        assert all(value.isfinite().all() for value in (h, *last))
        for leaves in (weights, [x, *state, *weights]):
            for leaf in leaves:
                leaf.requires_grad_()
            h, last = fused_rnn.run_layers(name, x, state, weights, options)
            dys = [torch.ones_like(y) for y in (h, *last)]
            found = torch.autograd.grad([h, *last], leaves, dys)
            assert all(value.isfinite().all() for value in (h, *last, *found))


@pytest.mark.skipif(DEVICE != "cuda", reason="about products of cuBLAS")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True}])
def test_large_products_of_odd_widths(dtype, options, monkeypatch):
    """Products through padded copies: the input's, and the gradients of weights and input."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    twins = (
        torch.nn.LSTM(333, 301, 2, device=DEVICE, **options),
        flashcell.LSTM(333, 301, 2, device=DEVICE, dtype=dtype, backend=DEVICE, **options),
    )
    twins[0].load_state_dict({k: v.float() for k, v in twins[1].state_dict().items()})
    shape = (512, 9) if "batch_first" in options else (9, 512)
    x = torch.randn(*shape, 333, device=DEVICE, dtype=dtype)
    assert 9 * 512 * 333 * 4 * 301 > 500_000_000
    found = []
    for twin in twins:
        leaf = x.to(next(twin.parameters()).dtype).requires_grad_()
        y, _ = twin(leaf)
        grads = torch.autograd.grad(y.float().square().sum() / 512, [leaf, *twin.parameters()])
        found.append([y, *grads])
    for want, have in zip(*found, strict=True):
        error = (want - have.float()).abs().max() / want.abs().max()
        assert error < 40 * torch.finfo(dtype).eps, error


@pytest.mark.skipif(DEVICE != "cpu", reason="about memory of the CPU kernel")
def test_scratch_stays_for_the_next_call(fused_rnn):
    """Blocks of many sizes do not push the large ones out: fresh memory costs page faults."""
    calls = [(torch.randn(96 + n, 640), torch.randn(640, 640)) for n in range(24)]
    x, weight = torch.randn(128, 1024), torch.randn(2048, 1024)
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with torch.no_grad():
        for _ in range(3):
            for a, b in calls:
                fused_rnn.linear(a, b)
        for _ in range(5):
            fused_rnn.linear(x, weight)
        rounds = []  # the least, as a thread that lost its core may keep others from the cache
        for _ in range(10):
            before = faults()
            for _ in range(5):
                fused_rnn.linear(x, weight)
            rounds.append(faults() - before)
    assert min(rounds) < 50, rounds
