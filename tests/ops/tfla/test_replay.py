"""Tests decoding with a ring of the last steps against decoding without one, in float64. The equations
are tested by reference/test_tfla_replay.py."""

from functools import partial

import pytest
import torch

from cases import DEVICE, upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import CELLS, Case, make, unscaled
from numerics import assert_bitwise
from ops.tfla.test_sequence import assert_near, short

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
PER_STEP = ("q", "k", "v", "i", "f", "out_gate")
CASES = [  # T is the number of steps, `chunk` the size of the ring
    Case(1, 5, 1, 8, 8, ("state",), 1),
    Case(3, 9, 2, 24, 40, ("state", "layer", "eps"), 3),
    Case(2, 5, 1, 264, 520, ("state", "strided"), 2),
    Case(1, 4, 1, 1024, 136, ("state",), 3),
    Case(2, 35, 1, 136, 16, ("state", "rms"), 16),
    Case(2, 6, 1, 128, 256, ("state", "layer"), 4),
    Case(1, 18, 2, 256, 512, ("state",), 16),
    Case(2, 7, 2, 16, 24, ("state",), 5, 10.0, -2.0),
    Case(0, 2, 2, 16, 24, ("state",), 5),
]
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def backend_of(tfla):
    return DEVICE if hasattr(tfla.dispatch.ops, "mlstm_replay_") else "auto"


def split(call):
    """Returns the arguments of each step, and those that choose a cell."""
    names = [k for k in PER_STEP if k in call]
    steps = [{k: call[k][:, t] for k in names} for t in range(call["q"].shape[1])]
    rest = {
        k: call[k] for k in ("norm", "norm_weight", "eps", "input_gate", "normalize") if k in call
    }
    return steps, rest


def run_steps(kernel, call):
    steps, rest = split(call)
    state, results = call["state"], {}
    for t, step in enumerate(steps):
        h, state = kernel.mlstm_step(**step, **rest, state=state)
        results[f"h {t}"] = h
    return results | {f"last[{s}]": x for s, x in enumerate(unscaled(state))}


def run_replay(kernel, call, size, **options):
    """Also checks what each step writes. The rows do not begin at the same entry."""
    steps, rest = split(call)
    state, results = tuple(s.clone() for s in call["state"]), {}
    ring = kernel.mlstm_ring(state[0], call["q"].dtype, size)
    cell = {k: rest[k] for k in ("input_gate", "normalize") if k in rest}
    folded = torch.zeros(ring.used.shape[0], dtype=torch.bool, device=ring.used.device)
    for t, step in enumerate(steps):
        before = [s.clone() for s in state]
        full = ring.used[:, 0] == size
        h = kernel.mlstm_replay_step(**step, **rest, state=state, ring=ring, **options)
        results[f"h {t}"] = h
        for old, new in zip(before, state, strict=True):
            assert_bitwise(f"state after step {t}", new[~full], old[~full])
        if t == 0 and len(full) > 1:  # the other rows fold later
            row = slice(0, 1)
            part = [s[row] for s in state], type(ring)(*(x[row] for x in ring))
            kernel.mlstm_fold(*part, **cell, **options)
            assert not ring.used[0].any()
            assert ring.used[1:].all()
        folded |= full
    assert bool(folded.all())
    late = len(folded) > 1
    counts = [(len(steps) - 1 - (late and row == 0)) % size + 1 for row in range(len(folded))]
    assert ring.used[:, 0].tolist() == counts
    kernel.mlstm_fold(state, ring, **cell, **options)
    assert not ring.used.any()
    return results | {f"last[{s}]": x for s, x in enumerate(unscaled(state))}


def check(tfla, cell, case, dtype):
    call = make(cell, case, dtype)
    call.pop("chunk_size")
    got = run_replay(tfla, call, case.chunk, backend=backend_of(tfla))
    exact, near = run_steps(reference, upcast(call)), run_steps(reference, call)
    assert got.keys() == exact.keys()
    for key, value in exact.items():
        name = "h" if key[0] == "h" else key
        assert_near(f"{case} {key}", name, got[key], value, near[key], dtype, True)
    return got


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_exact_as_steps_without_a_ring(tfla, cell, case, dtype):
    check(tfla, cell, case, dtype)


def rows_of_whole_heads(heads):
    """Returns how many rows of so many heads each give every thread block of a GPU a whole head."""
    return 2 * torch.cuda.get_device_properties(0).multi_processor_count // heads


@pytest.mark.skipif(DEVICE != "cuda", reason="about thread blocks on a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("K", "V"), [(256, 512), (128, 256)])
def test_enough_heads_for_a_thread_block_each(tfla, cell, K, V, dtype):
    check(tfla, cell, Case(rows_of_whole_heads(3), 6, 3, K, V, ("state", "layer"), 4), dtype)


@pytest.mark.skipif(DEVICE != "cuda", reason="about kernels on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_tiny_ring(tfla, cell, dtype):
    """Runs every kernel of a step with a ring, for scripts/check_cuda."""
    for K, V in ((24, 40), (128, 256), (256, 512)):
        for B in (2, rows_of_whole_heads(2)):
            call = make(cell, Case(B, 4, 2, K, V, ("state", "layer"), 2), dtype)
            call.pop("chunk_size")
            results = run_replay(tfla, call, 2, backend=DEVICE)
            assert all(value.isfinite().all() for value in results.values())


def test_steps_are_taken_back(tfla, cell):
    """Bitwise: two steps that are taken back leave no trace, wherever the ring is."""
    call = make(cell, Case(2, 9, 2, 16, 24, ("state",)), torch.bfloat16)
    steps, rest = split(call)
    outputs = []
    for tried in (False, True):
        state = tuple(s.clone() for s in call["state"])
        ring = tfla.mlstm_ring(state[0], torch.bfloat16, 4)
        run = partial(
            tfla.mlstm_replay_step, **rest, state=state, ring=ring, backend=backend_of(tfla)
        )
        for step in steps[:5]:
            run(**step)
        if tried:
            run(**steps[8]), run(**steps[7])
            ring.used.sub_(2)
        outputs.append([run(**step) for step in steps[5:]] + list(state))
    for a, b in zip(*outputs, strict=True):
        assert_bitwise("h or state", a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_shut_gate_ends(tfla, cell, value):
    """NaN and inf of one head's state or entry stay in it, and end when a forget gate is shut."""
    if backend_of(tfla) == "auto":
        pytest.skip("the reference multiplies by a decay of 0")
    call = make(cell, Case(2, 6, 2, 16, 24, ("state",)), torch.float32)
    call["f"][0, 3, 1] = -3000.0
    call["i"][0, 3, 1] = 9.0
    steps, rest = split(call)
    want = run_steps(reference, upcast(call))
    state = tuple(s.clone() for s in call["state"])
    ring = tfla.mlstm_ring(state[0], torch.float32, 4)
    state[0][0, 1, 3, 5] = value
    steps[1]["k"] = steps[1]["k"].clone()
    steps[1]["k"][0, 1, 2] = value
    for t, step in enumerate(steps):
        h = tfla.mlstm_replay_step(**step, **rest, state=state, ring=ring, backend=backend_of(tfla))
        finite = h.isfinite().all(-1)
        assert bool(finite[1].all())
        assert bool(finite[0, 0])
        assert bool(finite[0, 1]) == (t >= 3)
        assert_near(f"step {t}", "h", h[1], want[f"h {t}"][1], want[f"h {t}"][1], h.dtype, True)


def wrong(ring, state):
    """Yields rings and states, and why the op refuses them."""
    short = type(ring)(*(x[:, :, :0] if x.dim() > 2 else x for x in ring))
    yield short, state, "ring_k must have 1 to 16 entries, got 0"
    yield ring._replace(k=ring.k.transpose(2, 3)), state, "ring_k must have shape"
    yield ring._replace(v=ring.v.float()), state, "ring_v must have dtype"
    yield ring._replace(used=ring.used.long()), state, "used must have dtype"
    yield ring._replace(used=ring.used.expand(2, 2)[:1]), state, "used must have shape"
    place = ring.k.new_empty(ring.k.numel() + 4)[4:].view(ring.k.shape)
    yield ring._replace(k=place), state, "ring_k must be contiguous, and begin at a multiple of 16"
    yield ring._replace(f=ring.i), state, "ring_i is changed in place, so it must not share memory"
    C = state[0].new_empty(state[0].numel() + 1)[1:].view(state[0].shape)
    yield ring, (C, *state[1:]), "C must be contiguous, and begin at a multiple of 16 bytes"


def test_wrong_rings_are_refused(tfla, cell):
    """The op refuses what would be read or written elsewhere, also when called by itself."""
    if backend_of(tfla) == "auto":
        pytest.skip("there is no op")
    call = make(cell, Case(2, 1, 2, 16, 24, ("state",)), torch.bfloat16)
    normalized, exponential = len(call["state"]) > 1, len(call["state"]) > 2
    given = [call[k][:, 0] for k in ("q", "k", "v")] + [call[k][:, 0].float() for k in "if"]
    rest = (None, None, exponential, normalized, 0.0, False, False, 0.0)
    ring = tfla.mlstm_ring(call["state"][0], torch.bfloat16, 4)
    op = tfla.dispatch.ops.mlstm_replay_
    for entries, (C, *others), message in wrong(ring, call["state"]):
        n, m = [*others, None, None][:2]
        with pytest.raises(RuntimeError, match=message):
            op(*given, C, n, m, *entries, *rest)
    C, *others = call["state"]
    n, m = [*others, None, None][:2]
    with pytest.raises(RuntimeError, match="k, v, i and f must be None where q is"):
        op(None, *given[1:], C, n, m, *ring, *rest)
    with pytest.raises(RuntimeError, match="k, v, i and f must be given where q is"):
        op(given[0], None, *given[2:], C, n, m, *ring, *rest)
