"""Tests flash_gru and flash_lstm parallel in time in torch: as exact as the loop, with small and
large weights."""

from dataclasses import replace

import pytest
import torch

from diagonal_cases import CASES, EMPTY, REGIMES, draw_regime, leaves, make, parity, split
from flashcell.kernels import diagonal_rnn as kernel
from numerics import assert_close

CELLS = pytest.mark.parametrize("cell", list(kernel.CELLS.values()), ids=lambda cell: cell.name)
METHODS = pytest.mark.parametrize("method", ["newton", "multiple_shooting"])


def run(cell, x, weight, method="sequential", **options):
    given = x, *split(cell, weight.to(x.dtype))
    options = {"method": method, "return_info": True, "backend": "reference", **options}
    return getattr(kernel, cell.name)(*given, **options)


@CELLS
@METHODS
@pytest.mark.parametrize("regime", REGIMES)
def test_error_in_every_weight_regime(cell, method, regime):
    """fp32 is within 2e-6 of a float64 loop or, unclipped, where roundings grow, as far as the fp32
    loop."""
    x, weight = draw_regime(cell, regime, 2, 300, 32)
    h, last, info = run(cell, x, weight, method)
    exact, ends, _ = run(cell, x.double(), weight)
    loop, _, plain = run(cell, x, weight)
    error, peer = (float((v - exact).abs().max()) for v in (h, loop))
    assert error <= 2e-6 + (2 * peer if regime == "unclipped" else 0)
    for got, want in zip(last, ends, strict=True):
        assert (got - want).abs().max() <= 2e-6 + 2 * peer
    assert info.method == method
    assert (info.iterations.dtype, info.finished.dtype) == (torch.int32, torch.int32)
    assert (plain.iterations, plain.residual, plain.finished) == (0, 0, 0)
    if regime != "unclipped":
        assert info.finished == 0
        assert info.residual < 5e-7
        assert info.iterations <= 7  # observed: at most 6


@CELLS
@METHODS
@pytest.mark.parametrize("max_iters", [None, 3])
@pytest.mark.parametrize("gain", [1.2, 5.0])
def test_parity(cell, method, max_iters, gain):
    """Newton's method converges with weights that compute parity, far above max_recurrent; after
    three iterations the result is wrong, and `info` says so."""
    bits = torch.rand(4, 300, 3) < 0.5
    x, weight, state = parity(cell, bits, gain)
    options = {"state": state, "max_iters": max_iters}
    h, last, info = run(cell, x, weight, method, **options)
    loop, ends, _ = run(cell, x, weight, state=state)
    assert torch.equal(h > 0, bits.cumsum(1) % 2 == 0)
    assert (h - loop).abs().max() < 2e-6
    for got, want in zip(last, ends, strict=True):
        assert (got - want).abs().max() < 2e-6
    if max_iters == 3:
        assert info.residual > 1e-5
        assert info.finished > 40
    else:  # the bounds of the states keep the iterates where the cell contracts
        assert info.finished == 0
        assert info.iterations <= 7


@CELLS
@METHODS
@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_every_option_equals_sequential(cell, method, case):
    """Masks, packing, states, odd and empty shapes: values and gradients equal the loop's, in
    float64."""
    results = []
    for how in ("sequential", method):
        call, named = leaves(make(cell, replace(case, D=min(case.D, 40)), torch.float64))
        h, last = getattr(kernel, cell.name)(**call, method=how, backend="reference")
        torch.manual_seed(1)
        loss = sum((v * torch.randn_like(v)).sum() for v in (h, *last))
        names = ["h", *(f"last[{k}]" for k in range(len(last))), *(f"d {name}" for name in named)]
        grads = [torch.zeros(())] * len(named)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, named.values(), materialize_grads=True)
        results.append(dict(zip(names, (h, *last, *grads), strict=True)))
    want, got = results
    for name in want:
        assert_close(name, got[name], want[name], 3e-15)


@CELLS
@METHODS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(cell, method, dtype):
    """States are fp32 throughout: h equals the loop's, except for ties in the last rounding."""
    x, weight = torch.randn(2, 70, 3, 8).to(dtype), torch.rand(cell.weights, 8) - 0.5
    (h, last, _), (want, ends, _) = (run(cell, x, weight, how) for how in (method, "sequential"))
    assert h.dtype == dtype
    assert last[0].dtype == torch.float32
    assert (h == want).float().mean() > 0.99
    assert (last[0] - ends[0]).abs().max() < 1e-6


@CELLS
@METHODS
def test_nan_stays_in_its_channel(cell, method):
    x, weight = torch.randn(2, 200, 3, 8), torch.rand(cell.weights, 8) - 0.5
    x[1, 150, 1, 3], x[0, 90, 0, 5] = float("nan"), float("inf")
    h, last, _ = run(cell, x, weight, method)
    want, ends, _ = run(cell, x, weight)
    for got, exact in ((h, want), (last[0], ends[0])):
        assert torch.equal(got.isnan(), exact.isnan())
        assert (got - exact).nan_to_num(0.0).abs().max() < 2e-6
    assert want.isnan().any()
