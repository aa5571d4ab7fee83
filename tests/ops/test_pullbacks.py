"""Tests what torch.func.vjp returns, which is called after its transform has ended, and tensors that are
no ordinary memory: fake ones, those around others, freed ones, views that negate."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from cases import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device"),
    pytest.mark.filterwarnings("ignore:create_graph=True"),
]


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    if name in ("lstm", "gru", "slstm"):
        gates = 3 if name == "gru" else 4
        return {"x": (2, 5, gates, 2, 4), "weight": (gates, 2, 4, 4), "bias": (4, 2, 4)}
    if name == "lstm_step":
        return {"x": (2, 4, 2, 4), "weight": (4, 2, 4, 4), "bias": (4, 2, 4)}
    if name == "linear":
        return {"x": (4,), "weight": (3, 4), "bias": (3,)}
    if name == "flash_gru":
        return {"x": (2, 5, 3, 4), "a": (3, 4)}
    if name == "flash_lstm":
        return {"x": (2, 5, 3, 4), "a": (3, 4), "p": (2, 4)}
    if name == "linear_scan":
        return {"a": (2, 5, 4), "b": (2, 5, 4)}
    time = () if name == "mlstm_step" else (5,)
    qkv = dict.fromkeys("qkv", (2, *time, 2, 8))
    return {**qkv, "i": (2, *time, 2), "f": (2, *time, 2)}


# Without a state, a step has no gradients of what multiplies it.
STATES = {"lstm_step": [(2, 2, 4)] * 2, "mlstm_step": [(2, 2, 8, 8), (2, 2, 8), (2, 2)]}
NAMES = {
    "fused_rnn": ("lstm", "gru", "slstm", "lstm_step", "linear"),
    "diagonal_rnn": ("flash_gru", "flash_lstm", "linear_scan"),
    "tfla": ("mlstm", "mlstm_step"),
}
CALLS = [(kernel, name) for kernel, names in NAMES.items() for name in names]


@pytest.fixture(params=CALLS, ids=lambda call: call[1])
def call(request):
    """A function of the tensors, the same by the reference, and the tensors, in float64."""
    kernel, name = request.param
    function = getattr(request.getfixturevalue(kernel), name)
    given = [torch.randn(*shape, dtype=torch.float64) / 2 for shape in shapes(name).values()]

    state = tuple(torch.randn(*s, dtype=torch.float64) / 2 for s in STATES.get(name, ()))

    def run(*tensors, **options):
        if state:
            options["state"] = (
                state if tensors[0].dtype == torch.float64 else tuple(s.float() for s in state)
            )
        out = function(*tensors, **options)
        return out[0] if isinstance(out, tuple) else out

    return run, lambda *tensors: run(*tensors, backend="reference"), given


@pytest.mark.parametrize("outside", [False, True])
def test_every_subset_of_inputs(call, outside):
    """`outside`: the tensors that are not differentiated by vjp need gradients of their own."""
    run, reference, given = call
    for chosen in itertools.product([False, True], repeat=len(given)):
        tensors = [t.clone().requires_grad_(outside) for t in given]
        some = dict(itertools.compress(enumerate(tensors), chosen))
        if not some:
            continue
        found = []
        for function in (run, reference):
            part = lambda some, f=function, all=tensors: f(
                *(some.get(k, t) for k, t in enumerate(all))
            )
            y, pull = torch.func.vjp(part, some)
            found.append(pull(torch.ones_like(y))[0])
        torch.testing.assert_close(*found)
        assert all(d.abs().sum() > 0 for d in found[0].values())


def test_rows_of_a_jacobian(call):
    run, reference, (first, *rest) = call
    jacobian = lambda f: torch.func.jacrev(lambda t: f(t, *rest), chunk_size=1)(first)
    torch.testing.assert_close(jacobian(run), jacobian(reference))


def test_fake_tensors(call):
    run, _, given = call
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = run(*(mode.from_tensor(t).float() for t in given))
    assert y.shape == run(*given).shape


def test_tensors_around_others(call):
    run, _, given = call
    given = [t.float() for t in given]
    y = run(*(TwoTensor(t, t.clone()) for t in given))
    torch.testing.assert_close(y.a, run(*given), rtol=0, atol=0)


def test_tensors_whose_memory_was_freed_are_refused(call):
    run, _, given = call
    given[0].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its storage was freed"):
        run(*given)


def test_states_of_which_one_is_a_view_that_negates(fused_rnn):
    """They lie behind each other in memory, as the states that a step returns."""
    h, c = torch.randn(2, 2, 1, 3)  # in one storage
    x, weight = torch.randn(2, 4, 4, 1, 3), torch.randn(4, 1, 3, 3)
    for state in ((torch._neg_view(h), c), (h, torch._neg_view(c))):
        found = fused_rnn.lstm(x, weight, state=state)
        wanted = fused_rnn.lstm(x, weight, state=tuple(s.clone() for s in state))
        torch.testing.assert_close(found, wanted)
