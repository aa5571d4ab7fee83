"""Tests resets to given states against the reference's loop over single steps."""

import pytest
import torch

from cases import CASES, DEVICE, Case, make, upcast
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate
from ops.fused_rnn.test_sequence import CELLS, DTYPES, run, upstream

pytestmark = pytest.mark.usefixtures("poisoned")
OPTIONS = [
    ("reset",),
    ("state", "reset"),
    ("state", "reset", "hold"),
    ("state", "lengths", "reset", "hold"),
    ("state", "cu", "reset", "hold"),
    ("state", "reset", "strided"),
    ("state", "reset", "clip"),
]


def with_states(call, name):
    """Adds random states for the marks of the call's reset, one of them at the first step."""
    call["reset"][:, :1] |= torch.arange(len(call["reset"]))[:, None] == 0
    count = int(call["reset"].sum())
    shape = CELLS[name].states, count, *call["x"].shape[-2:]
    states = torch.randn(shape, dtype=torch.float64).abs() + 0.5
    dtype = torch.float64 if call["x"].dtype == torch.float64 else torch.float32
    return {**call, "reset_state": tuple(states.to(dtype))}


def by_steps(name, x, weight, bias=None, state=None, reset_state=None, grad_clip=None, **masks):
    """Runs the reference step by step, and puts the given states in place at each mark."""
    B, T, _, N, D = x.shape
    reset, hold, lengths = (masks.get(key) for key in ("reset", "hold", "lengths"))
    cu = masks.get("cu_seqlens")
    number = reset.flatten().cumsum(0).view(B, T) - 1  # of the mark, row by row
    spans = [(b, 0, T if lengths is None else int(lengths[b])) for b in range(B)]
    if cu is not None:
        spans = [(0, *pair) for pair in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
    h = torch.zeros(B, T, N, D, dtype=x.dtype)
    lasts, rows = [], []
    for s, (b, start, end) in enumerate(spans):
        kinds = CELLS[name].states
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        now = tuple(torch.zeros(1, N, D, dtype=dtype) for _ in range(kinds))
        now = now if state is None else tuple(k[s : s + 1] for k in state)
        for t in range(start, end):
            if reset[b, t]:
                now = tuple(k[number[b, t]][None] for k in reset_state)
            if hold is not None and hold[b, t]:
                continue
            y, now = reference.recurrent(
                name, x[b : b + 1, t : t + 1], weight, bias, now, grad_clip=grad_clip
            )
            rows.append((b, t, y))
        lasts.append(now)
    if rows:
        at = torch.tensor([b for b, _, _ in rows]), torch.tensor([t for _, t, _ in rows])
        h = h.index_put(at, torch.cat([y[0] for _, _, y in rows]))
    return h, tuple(torch.cat(k) for k in zip(*lasts, strict=True))


def with_leaves(function, name, call, dh, dlast, **options):
    """As `run`, with the gradients of reset_state."""
    given = tuple(s.detach().requires_grad_() for s in call["reset_state"])
    carried = CELLS[name].states - CELLS[name].detached_states
    kept = {}

    def recorded(*args, **rest):
        h, last = function(*args, **{**rest, "reset_state": given})
        outputs = [y for y in (h, *last) if y.requires_grad]
        ups = [
            d.to(y.dtype) for y, d in zip((h, *last), (dh, *dlast), strict=True) if y.requires_grad
        ]
        grads = torch.autograd.grad(
            outputs, given[:carried], ups, retain_graph=True, materialize_grads=True
        )
        kept.update({f"dreset_state[{k}]": g for k, g in enumerate(grads)})
        return h, last

    return run(recorded, name, call, dh, dlast, **options) | kept


@pytest.mark.skipif(DEVICE == "cuda", reason="the loop over steps is the CPU's")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("name", CELLS)
def test_they_are_the_loops(fused_rnn, name, options, dtype):
    call = with_states(make(CELLS[name], Case(3, 13, 2, 8, options), dtype), name)
    dh, dlast = upstream(name, call, dtype)
    got = with_leaves(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    peer = with_leaves(by_steps, name, call, dh, dlast)
    exact = with_leaves(by_steps, name, upcast_all(call), dh, dlast)
    assert got.keys() == exact.keys()
    for key in exact:
        terms = 39 if key in ("dweight", "dbias") else 8
        assert_as_accurate(f"{name} {options} {key}", got[key], exact[key], peer[key], terms)


def upcast_all(call):
    return {**upcast(call), "reset_state": tuple(s.double() for s in call["reset_state"])}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [c for c in CASES if "reset" in c.options], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_every_dtype(fused_rnn, name, case, dtype):
    """The reference splits sequences as the kernels do; that this is right, the test above shows."""
    call = with_states(make(CELLS[name], case, dtype), name)
    dh, dlast = upstream(name, call, dtype)
    got = with_leaves(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    peer = with_leaves(reference.recurrent, name, call, dh, dlast)
    exact = with_leaves(reference.recurrent, name, upcast_all(call), dh, dlast)
    for key in exact:
        values = got[key], exact[key], peer[key]
        on_cuda = (dtype, key.startswith("d")) if DEVICE == "cuda" else None
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, on_cuda)


def test_with_the_states_of_every_step(fused_rnn):
    call = with_states(
        make(CELLS["lstm"], Case(3, 9, 1, 8, ("state", "reset")), torch.float32), "lstm"
    )
    h, (h_n, c_n), (_, c) = fused_rnn.lstm(**call, return_states=True, backend=DEVICE)
    torch.testing.assert_close((h[:, -1], c[:, -1]), (h_n, c_n))
    zeros = tuple(torch.zeros_like(s) for s in call["reset_state"])
    plain = {key: value for key, value in call.items() if key != "reset_state"}
    got, want = fused_rnn.lstm(**{**call, "reset_state": zeros}), fused_rnn.lstm(**plain)
    torch.testing.assert_close(got, want)


def test_wrong_states_are_refused(fused_rnn):
    call = with_states(make(CELLS["gru"], Case(3, 9, 1, 8, ("reset",)), torch.float32), "gru")
    (given,) = call["reset_state"]
    for wrong, error, text in (
        ((given, given), ValueError, "reset_state is 2 tensors, but gru needs a tuple of 1"),
        ((given[..., :4],), ValueError, r"reset_state\[0\] has shape"),
        ((None,), TypeError, r"reset_state\[0\] is a NoneType, but must be a tensor"),
        ((given[:-1],), ValueError, f"has {len(given) - 1} rows, but must have {len(given)}"),
    ):
        if DEVICE == "cuda" and "rows" in text:
            continue
        with pytest.raises(error, match=text):
            fused_rnn.gru(**{**call, "reset_state": wrong})
    with pytest.raises(ValueError, match="reset_state is given without reset"):
        fused_rnn.gru(**{**call, "reset": None})


def test_a_state_is_not_rounded_to_the_dtype_of_reset_state(fused_rnn):
    x, weight = torch.randn(1, 3, 4, 1, 4), torch.randn(4, 1, 4, 4)
    state = tuple(torch.randn(2, 1, 1, 4))
    marks = torch.tensor([[0, 0, 1]], dtype=torch.bool)
    zeros = (torch.zeros(1, 1, 4, dtype=torch.bfloat16),) * 2
    found = fused_rnn.lstm(x, weight, state=state, reset=marks, reset_state=zeros)
    wanted = fused_rnn.lstm(x, weight, state=state, reset=marks)
    torch.testing.assert_close(found, wanted)
