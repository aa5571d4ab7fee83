"""Tests every cell, option and dtype: outputs and all gradients against the float64 reference."""

import pytest
import torch

from cases import CASES, DEVICE, EMPTY, make, upcast, with_gradients
from flashcell.kernels import fused_rnn as reference
from numerics import assert_as_accurate

CELLS = reference.CELLS
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cuda":
    DTYPES.remove(torch.float64)  # float64 has the reference only
pytestmark = pytest.mark.usefixtures("poisoned")


def run(function, name, call, dh, dlast, **options):
    """Returns (h, states, gradients of every floating input) of one call, as named tensors."""
    leaf = lambda t: t.detach().requires_grad_(t.is_floating_point())
    call = {k: tuple(map(leaf, v)) if k == "state" else v for k, v in call.items()}
    call.update({k: leaf(call[k]) for k in ("x", "weight", "bias") if k in call})
    h, last = function(name, **call, **options)
    carried = reference.CELLS[name].states - reference.CELLS[name].detached_states
    sources = {k: call[k] for k in ("x", "weight", "bias") if k in call}
    sources.update({f"state[{k}]": s for k, s in enumerate(call.get("state", ())[:carried])})
    return with_gradients(h, last, sources, dh, dlast)


def upstream(name, call, dtype):
    """Returns random output gradients, representable in `dtype`."""
    B, T, _, N, D = call["x"].shape
    sequences = len(call["cu_seqlens"]) - 1 if "cu_seqlens" in call else B
    dh = torch.randn(B, T, N, D).to(dtype)
    return dh, torch.randn(CELLS[name].states, sequences, N, D)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_kernel_is_as_exact_as_the_reference(fused_rnn, name, case, dtype):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    peer = run(reference.recurrent, name, call, dh, dlast)
    exact = run(reference.recurrent, name, upcast(call), dh, dlast)
    assert got.keys() == exact.keys()
    for key in exact:
        values = got[key], exact[key], peer[key]
        on_cuda = (dtype, key.startswith("d")) if DEVICE == "cuda" else None
        assert_as_accurate(f"{name} {case} {key}", *values, case.D, on_cuda)


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_empty_sizes(fused_rnn, name, case):
    """B, T, N or the number of documents may be 0: shapes are right, and states pass through."""
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    got = run(fused_rnn.recurrent, name, call, dh, dlast, backend=DEVICE)
    want = run(reference.recurrent, name, call, dh, dlast)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)
