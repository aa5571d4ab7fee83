"""Tests that nothing from before a reset remains in tfla, wherever the reset is."""

import pytest
import torch

from cases import DEVICE, upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import CELLS, Case, make, unscaled
from mlstm_peer import Peer
from numerics import assert_close
from ops.tfla.test_sequence import DTYPES, SEQUENCE, assert_near, moved, run, short, upstream

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


@pytest.mark.parametrize("t", range(0, 40, 3))
def test_reset_at_every_position(tfla, cell, t):
    """Nothing from before remains, NaN included; documents of one step too."""
    call = make(cell, Case(1, 40, 1, 16, 16, ("state",)), torch.float32)
    call["state"][0][0, 0, 3, 2] = float("nan")
    reset = torch.zeros(1, 40, dtype=torch.bool)
    reset[0, t : t + 3] = True
    h, last = tfla.mlstm(**call, reset=reset)
    start = min(t + 2, 39)
    part = {k: call[k][:, start:] for k in SEQUENCE[:5]}
    want, end = tfla.mlstm(**{**call, **part, "state": None})
    assert_close("h", h[:, start:], want, 1e-6)
    for got, exact in zip(unscaled(last), unscaled(end), strict=True):
        assert_close("state", got, exact, 1e-6)


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [64, 256])
def test_a_reset_at_every_step_of_tiles_and_chunks(tfla, cell, size, dtype):
    """Sequence t is reset at step t, so that one call has a reset at every place in a chunk: chunks
    of one tile of 64 steps or of several, and the shorter last chunk."""
    call = make(cell, Case(140, 140, 1, 16, 24, ("state",), size), dtype)
    call["reset"] = torch.eye(140, dtype=torch.bool)
    given = upstream(call, dtype)
    got, near = run(tfla, call, given, backend=DEVICE), run(Peer, call, given)
    exact = run(reference, upcast(call), given)
    lost = moved(call, given, exact) if dtype == torch.float32 else {}
    for key in exact:
        assert_near(key, key, got[key], exact[key], near[key], dtype, False, lost.get(key, 0.0))
