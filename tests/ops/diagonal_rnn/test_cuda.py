"""Tests diagonal-rnn on CUDA: every method and kernel against float64, with small and large
weights."""

from dataclasses import replace

import pytest
import torch

from cases import DEVICE, Case, to_device, upcast
from diagonal_cases import CASES, EMPTY, REGIMES, draw_regime, make, parity, split
from flashcell.kernels import diagonal_rnn as reference
from numerics import EPS, assert_as_accurate, assert_bitwise, assert_close, rms
from ops.diagonal_rnn.test_scan import draw
from ops.diagonal_rnn.test_scan import run as run_scan
from ops.diagonal_rnn.test_sequence import run, upstream

CELLS = reference.CELLS
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]
MASKS = ("state", "reset", "hold", "lengths")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = ["sequential", "multiple_shooting", "newton"]
short = lambda dtype: str(dtype)[6:]
# Several chunks of multiple shooting (32 steps at least), segments of Newton's method (64) and
# tiles of the scan; odd rows of 16 bits, more channels than a warp, documents that begin inside a
# chunk.
LONG = [
    Case(2, 300, 1, 40, ("state",)),
    Case(3, 137, 1, 70, MASKS),
    Case(1, 260, 1, 33, ("state", "reset")),
    Case(2, 129, 1, 40, ("state", "strided")),
    Case(6, 50, 1, 40, ("state", "cu", "reset", "hold")),
    Case(4, 90, 1, 41, ("state", "cu")),
    Case(2, 300, 1, 40, ("bias", "state")),
    Case(7, 11, 1, 3702, MASKS),  # enough channels for sequential passes in pairs of fp32
    Case(7, 11, 1, 3702, ("strided", "bias")),
    Case(9, 11, 1, 3701, ("bias",)),
    Case(9, 27, 1, 3702, ("state", "lengths")),  # full groups of its backward, and partial ones
]


@pytest.fixture(params=CELLS)
def name(request):
    return request.param


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def to_cpu(call):
    return to_device(call, "cpu")


def some_of(values, D):
    """Selects a few dozen of the D channels, in every tensor that has them: channels are
    independent."""
    if isinstance(values, torch.Tensor):
        wanted = torch.arange(0, D, D // 48 if D > 96 else 1, device=values.device)
        return values[..., wanted] if values.shape[-1:] == (D,) else values
    if isinstance(values, dict):
        return {k: v if "lengths" in k else some_of(v, D) for k, v in values.items()}
    return tuple(some_of(v, D) for v in values)


def references(name, call, dh, dlast):
    """Returns the reference in float64 and in the call's dtype, on the CPU, where its loop is
    faster."""
    D = call["x"].shape[-1]
    masks = {k: call[k] for k in ("reset", "hold", "lengths", "cu_seqlens") if k in call}
    with torch.device("cpu"):
        call = to_cpu({**some_of(call, D), **masks})
        given = (some_of(dh, D).cpu(), some_of(dlast, D).cpu())
        return [
            run(getattr(reference, name), c, *given, method="sequential")
            for c in (upcast(call), call)
        ]


def compare(label, got, call, exact, peer):
    B, T, _, D = call["x"].shape
    for key in exact:
        is_gradient = key.startswith("d")
        terms = B * T if key in ("da", "dp", "dbias") else T if is_gradient else 1
        values = some_of(got[key], D).cpu(), exact[key], peer[key]
        assert_as_accurate(f"{label} {key}", *values, terms, (call["x"].dtype, is_gradient))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", [*LONG, *CASES], ids=str)
def test_every_method_is_as_exact_as_the_reference(diagonal_rnn, name, method, case, dtype):
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, method=method, backend="cuda")
    compare(f"{name} {method} {case}", got, call, *references(name, call, dh, dlast))


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty_sizes(diagonal_rnn, name, method, case):
    call = make(CELLS[name], case, torch.float32)
    dh, dlast = upstream(name, call, torch.float32)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, method=method)
    want, _ = references(name, call, dh, dlast)
    for key in want:
        assert_bitwise(key, got[key].cpu(), want[key].to(got[key].dtype))


def regime_call(name, which, dtype):
    """Returns x, the weights (a, p), and h and last states in float64 and in float32, on the CPU."""
    with torch.device("cpu"):
        x, weight = draw_regime(CELLS[name], which, 2, 1500, 64)
        x, weights = x.to(dtype), split(CELLS[name], weight)
        wide, loop = (
            getattr(reference, name)(x.to(d), *(w.to(d) for w in weights), method="sequential")
            for d in (torch.float64, torch.float32)
        )
    return x.cuda(), [w.cuda() for w in weights], wide, loop


@pytest.mark.parametrize("which", REGIMES)
def test_error_in_every_weight_regime(diagonal_rnn, name, method, which):
    """fp32 is within 2e-6 of a float64 loop or, where roundings add up, not far from the fp32 loop."""
    x, weights, exact, loop = regime_call(name, which, torch.float32)
    h, last, info = getattr(diagonal_rnn, name)(x, *weights, method=method, return_info=True)
    worst = lambda got, want: (got.cpu() - want).abs().flatten(0, 1).amax(0)  # for each channel
    errors, peers = worst(h, exact[0]), worst(loop[0], exact[0])
    # Chaotic channels multiply any rounding, so compare all channels together.
    if which == "unclipped":
        for share in (0.5, 0.9):
            assert errors.quantile(share) <= 2e-6 + 2 * peers.quantile(share)
    else:
        bound = 2e-6 + (peers.max() if which == "slower" else 0)
        assert errors.max() <= bound
        for got, want in zip(last, exact[1], strict=True):
            assert (got.cpu() - want).abs().max() <= bound
    assert info.method == method
    if method == "sequential":
        assert (int(info.iterations), float(info.residual), int(info.finished)) == (0, 0.0, 0)
    elif which != "unclipped":
        assert int(info.finished) == 0
        assert float(info.residual) <= 5e-7
        assert int(info.iterations) <= (3 if method == "multiple_shooting" else 10)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@pytest.mark.parametrize("which", [r for r in REGIMES if r != "unclipped"])
def test_16_bit_functions_are_below_the_rounding(diagonal_rnn, name, method, dtype, which):
    """bf16 uses tanh.approx, which adds less than a tenth of the rounding of h."""
    x, weights, (exact, ends), _ = regime_call(name, which, dtype)
    h, last = getattr(diagonal_rnn, name)(x, *weights, method=method)
    rounding = rms(exact.to(dtype).double() - exact)
    assert rms(h.cpu().double() - exact) <= 1.1 * rounding
    for got, want in zip(last, ends, strict=True):  # unrounded: the error of the functions alone
        assert (got.cpu().double() - want).abs().max() <= EPS[dtype] / 2 * want.abs().max()


@pytest.mark.parametrize("max_iters", [None, 1])
@pytest.mark.parametrize("gain", [1.2, 5.0])
def test_parity(diagonal_rnn, name, method, gain, max_iters):
    """Weights that compute parity, for which few iterations are wrong: this is found, reported and
    corrected."""
    with torch.device("cpu"):
        bits = torch.rand(4, 500, 3) < 0.5
        x, weight, state = parity(CELLS[name], bits, gain)
        given = x, *split(CELLS[name], weight)
        loop, ends = getattr(reference, name)(*given, state, method="sequential")
    given, state = (tuple(t.cuda() for t in ts) for ts in (given, state))
    options = {"method": method, "max_iters": max_iters, "return_info": True}
    h, last, info = getattr(diagonal_rnn, name)(*given, state, **options)
    assert torch.equal(h.cpu() > 0, bits.cumsum(1) % 2 == 0)
    assert (h.cpu() - loop).abs().max() < 2e-6
    for got, want in zip(last, ends, strict=True):
        assert (got.cpu() - want).abs().max() < 2e-6
    if method == "newton" and max_iters == 1:
        assert float(info.residual) > 1e-5
        assert int(info.finished) > 40


# Sequences, steps, words (fp32 channels, or pairs of 16 bits) for which plan.h chooses each
# backward
WAYS = {
    "linear_walk": (6, 37, 2064),
    "linear_walk of pairs": (12, 37, 2070),
    "scan": (2, 900, 70),
    "reach": (6, 2100, 2000),
}


def backward_call(name, way, options, dtype):
    B, T, D = WAYS[way]
    D *= 2 if dtype != torch.float32 else 1
    call = make(CELLS[name], Case(B, T, 1, D, options), dtype)
    return call, *upstream(name, call, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("options", [("state",), MASKS], ids="-".join)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_back(diagonal_rnn, name, way, options, dtype):
    call, dh, dlast = backward_call(name, way, options, dtype)
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, method="sequential")
    compare(f"{name} {way}", got, call, *references(name, call, dh, dlast))


@pytest.mark.parametrize("way", WAYS)
def test_which_kernel_goes_back(diagonal_rnn, way):
    """plan.h chooses the backward that the tests here assume."""
    call, dh, dlast = backward_call("flash_gru", way, (), torch.float32)
    run(diagonal_rnn.flash_gru, call, dh, dlast)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(diagonal_rnn.flash_gru, call, dh, dlast, method="sequential")
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "flashcell" in event.key]
    assert any(f"{way.split()[0]}_kernel" in key for key in kernels), kernels


def test_gradients_that_do_not_fade_go_back_as_a_scan(diagonal_rnn):
    """With z shut, dh0 is the sum of dh, and no burn-in finds the carry of a chunk of 2,000 steps."""
    B, T, D = 6, 4000, 2000
    x = torch.randn(B, T, 3, D)
    x[:, :, 0] = -40
    x, h0 = x.requires_grad_(), torch.randn(B, D).requires_grad_()
    h, _ = diagonal_rnn.flash_gru(x, torch.zeros(3, D), (h0,), method="sequential")
    dh = torch.randn(B, T, D)
    _, dh0 = torch.autograd.grad(h, (x, h0), dh)
    assert_close("dh0", dh0.double(), dh.double().sum(1), 2e-6)


# Small enough for compute-sanitizer, and together every kernel: narrow and wide sequential passes,
# chunks that start over, Newton iterations and the finish, tiles, every backward; with and without
# masks.
TINY = {
    "sequential": [Case(2, 20, 1, 40, ("state",)), Case(1, 9, 1, 640), Case(3, 19, 1, 33, MASKS)],
    "multiple_shooting": [Case(1, 70, 1, 40, ("state",)), Case(2, 80, 1, 33, MASKS)],
    "newton": [Case(1, 70, 1, 40, ("state",)), Case(2, 80, 1, 33, MASKS)],
    "linear_walk": [Case(7, 6, 1, D, options) for D in (3702, 4128) for options in ((), MASKS)],
    # The smallest that plan.h splits into chunks: two of 256 steps
    "reach": [Case(2, 511, 1, 5470), Case(2, 511, 1, 5470, ("state", "lengths"))],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    ("engine", "case"), [(engine, c) for engine, cases in TINY.items() for c in cases], ids=str
)
def test_tiny(diagonal_rnn, name, engine, case, dtype):
    """Runs every kernel of the cells once, and nothing else on the GPU, for scripts/check_cuda."""
    if engine == "reach":  # the same number of words for each dtype
        case = replace(case, D=case.D * 4 // dtype.itemsize)
    call = make(CELLS[name], case, dtype)
    dh, dlast = upstream(name, call, dtype)
    method = engine if engine in METHODS else "sequential"
    got = run(getattr(diagonal_rnn, name), call, dh, dlast, method=method, backend="cuda")
    exact, _ = references(name, call, dh, dlast)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-5}[dtype]
    for key in exact:
        value = some_of(got[key], case.D).cpu().double()
        assert_close(f"{name} {case} {key}", value, exact[key], tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "n"),
    [((2, 300, 40), None), ((2, 150, 33), None), ((1, 1, 72), None)]
    + [((9, 9, 3702), None), ((9, 9, 3704), None)]
    + [((2, 70, 33), n) for n in (2, 3, 4)]
    + [((9, 5, 1900), n) for n in (2, 3, 4)],
    ids=lambda v: {None: "linear_scan"}.get(v, f"block_scan{v}" if isinstance(v, int) else str(v)),
)
def test_tiny_scan(diagonal_rnn, shape, n, reverse, dtype):
    """Runs every kernel of the scans once, forward and backward, for scripts/check_cuda."""
    with torch.device("cpu"):
        given = draw(shape, n, dtype)
        dh = torch.randn(given[1].shape).to(dtype)
        exact = run_scan(reference, [t.double() for t in given], dh, reverse)
    got = run_scan(diagonal_rnn, [t.cuda() for t in given], dh.cuda(), reverse)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for key in exact:
        assert_close(key, got[key].cpu().double(), exact[key], tolerance)
