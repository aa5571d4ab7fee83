"""Tests that a step which changes its state in place refuses a state that shares memory with
another argument."""

import pytest
import torch

from flashcell.kernels import diagonal_rnn, fused_rnn, tfla
from ops import test_raw_ops
from ops.fused_rnn import test_block_step

B, D = 2, 8
kernel = test_raw_ops.kernel  # the fixture
MODULES = {"fused_rnn": fused_rnn, "diagonal_rnn": diagonal_rnn, "tfla": tfla}
BACKENDS = ["auto", "reference"]


def r(*shape):
    return torch.randn(*shape)


def block(cell):
    return test_block_step.make(cell, (B, 2, 8, 16), torch.float32)


def mixer(cell):
    rows = (r(3, D), r(2, D))[: 1 + (cell == "flash_lstm")]
    state = tuple(r(B, D) for _ in rows)
    call = {"x": r(B, D), "weight": r(2, 3, 4, 4), "bias": r(3, D), "rows": rows, "state": state}
    return {**call, "skip": r(D), "gate": r(B, D)}


def conv():
    return {"x": r(B, D), "weight": r(D, 4), "bias": r(D), "window": r(B, 3, D)}


def mlstm():
    call = {"q": r(B, 2, 8), "k": r(B, 2, 8), "v": r(B, 2, 8), "i": r(B, 2), "f": r(B, 2)}
    call |= {"state": (r(B, 2, 8, 8), r(B, 2, 8), r(B, 2)), "norm_weight": r(2, 8)}
    return {**call, "out_gate": r(B, 2, 8), "norm": "rms", "inplace": True}


CALLS = {
    "block_step": ("fused_rnn", lambda: {"cell": "lstm", **block("lstm")}),
    "mixer_step": ("diagonal_rnn", lambda: {"cell": "flash_lstm", **mixer("flash_lstm")}),
    "conv_step": ("diagonal_rnn", conv),
    "mlstm_step": ("tfla", mlstm),
}


def flat(call):
    """Returns (name, where, tensor) of every tensor, where as in `put`."""
    for key, value in call.items():
        if isinstance(value, torch.Tensor):
            yield key, (key, None), value
        elif isinstance(value, tuple):
            for k, one in enumerate(value):
                yield f"{key}[{k}]", (key, k), one


def put(call, where, tensor):
    key, k = where
    new = tensor if k is None else (*call[key][:k], tensor, *call[key][k + 1 :])
    return {**call, key: new}


def overlapped(first, second):
    """Returns two tensors like these, in which the last number of the first is the first of the
    second."""
    both = torch.randn(first.numel() + second.numel() - 1, device=first.device)
    one, two = both[: first.numel()], both[first.numel() - 1 :]
    return one.view(first.shape), two.view(second.shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_state_in_the_memory_of_another_argument_is_refused(request, name, backend):
    module, make = CALLS[name]
    entry = getattr(request.getfixturevalue(module), name)
    entry = getattr(MODULES[module], name) if backend == "reference" else entry
    call = {**make(), "backend": backend}
    entry(**call)
    written = [t for t in flat(call) if t[1][0] in ("state", "window")]
    for at, where, state in written:
        for other, there, tensor in flat(call):
            if there == where:
                continue
            for pair in (overlapped(state, tensor), overlapped(tensor, state)[::-1]):
                given = put(put(call, where, pair[0]), there, pair[1])
                before = [t.clone() for _, _, t in flat(given)]
                with pytest.raises(
                    ValueError, match=r"shares memory with .*, but is written"
                ) as error:
                    entry(**given)
                assert at in str(error.value)
                assert other in str(error.value)
                for (_, _, t), old in zip(flat(given), before, strict=True):
                    assert torch.equal(t, old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_that_lie_between_each_other_are_taken(diagonal_rnn, backend):
    """States that are columns of one buffer: their spans of addresses meet but no element does."""
    call = mixer("flash_lstm")
    wide = torch.cat([*call["state"], call["x"]], 1)
    given = {**call, "state": (wide[:, :D], wide[:, D : 2 * D]), "x": wide[:, 2 * D :]}
    run = lambda call: diagonal_rnn.mixer_step("flash_lstm", **call, backend="auto")
    torch.testing.assert_close(run(given), run(call))
    for got, want in zip(given["state"], call["state"], strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=r"state\[1\] shares memory with state\[0\]"):
        run({**given, "state": (wide[:, :D], wide[:, 1 : D + 1])})


def test_empty_states_share_nothing(diagonal_rnn):
    empty = r(4, D)[2:2]
    diagonal_rnn.conv_step(empty, r(D, 4), r(D), r(4, 3, D)[2:2])


def test_an_op_refuses_it_by_name(kernel):
    for op, arguments in test_raw_ops.in_place(kernel):
        written = [name for name, _ in test_raw_ops.state_of(op, arguments)]
        given = list(test_raw_ops.tensors(op, arguments))
        states = [t for t in given if t[0] in written]
        for name, where, state in states:
            for other, there, tensor in given:
                if there == where or tensor.dtype != state.dtype:
                    continue
                one, two = overlapped(state, tensor)
                bad = test_raw_ops.replaced(
                    test_raw_ops.replaced(arguments, where, one), there, two
                )
                with pytest.raises(RuntimeError, match="must not share memory with") as error:
                    op(*bad)
                assert name in str(error.value)
                assert other in str(error.value)
