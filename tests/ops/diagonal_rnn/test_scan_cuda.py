"""Tests diagonal-rnn's scans on CUDA: the kernels that the shapes of the shared tests do not reach."""

import pytest
import torch

from arch_cases import code_of
from cases import DEVICE, replayed
from flashcell.kernels import diagonal_rnn as reference
from numerics import assert_as_accurate, assert_bitwise, assert_close
from ops.diagonal_rnn.test_scan import DTYPES, draw, run, short

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda"),
]


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((2, 300, 40), "cluster_scan"), ((2, 300, 33), "scan"), ((9, 9, 3704), "linear_walk")],
    ids=str,
)
def test_which_kernel_scans(diagonal_rnn, shape, kernel):
    """plan.h chooses the kernel that the tests here assume: clusters if rows are whole pieces of 16
    bytes."""
    clusters = torch.cuda.get_device_capability()[0] in (9, 10) and code_of(diagonal_rnn).arch >= 90
    if kernel == "cluster_scan" and not clusters:
        kernel = "scan"
    a, b, _ = draw(shape, None, torch.float32)
    diagonal_rnn.linear_scan(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        diagonal_rnn.linear_scan(a, b)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "flashcell" in event.key]
    assert any(f"::{kernel}_kernel" in key for key in kernels), kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "n"),
    [
        *[((2, 5000, 40), n) for n in (None, 2, 3, 4)],
        ((1, 3000, 33), None),
        ((1, 1100, 16000), None),  # a cluster of one block per column, beyond L2
        ((1, 33000, 264), None),  # clusters of several blocks
        ((1, 4400, 4001), None),  # so many steps that the backward's tiles are longer
        ((9, 41, 3700), None),
        ((9, 23, 3701), None),
        ((9, 23, 3702), None),
        ((9, 23, 1900), 2),
    ],
    ids=str,
)
def test_long_and_wide_scans(diagonal_rnn, shape, n, reverse, dtype):
    """Many tiles and groups of them; wide ones run sequentially."""
    given = draw(shape, n, dtype)
    dh = torch.randn(given[1].shape).to(dtype)
    got = run(diagonal_rnn, given, dh, reverse)
    with torch.device("cpu"):
        given, dh = [t.cpu() for t in given], dh.cpu()
        peer = run(reference, given, dh, reverse)
        exact = run(reference, [t.double() for t in given], dh, reverse)
    for key in exact:
        assert_as_accurate(key, got[key].cpu(), exact[key], peer[key], n or 1)


def by_doubling(a, b, h0):
    """Computes linear_scan in float64 in log2(T) steps."""
    a, b = a.double(), b.double()
    b[:, 0] += a[:, 0] * h0.double()
    span = 1
    while span < a.shape[1]:
        b[:, span:] = torch.addcmul(b[:, span:], a[:, span:], b[:, :-span])
        a[:, span:] = a[:, span:] * a[:, :-span]
        span *= 2
    return b


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("D", [1032, 520])
def test_long_scan(diagonal_rnn, D, reverse, dtype):
    """Enough steps for the clusters that plan.h chooses for them; incomplete tiles and columns."""
    a, b, h0 = draw((1, 2**26 // D + 37, D), None, dtype)
    h = diagonal_rnn.linear_scan(a, b, h0, reverse=reverse)
    ahead = lambda t: t[..., ::21].flip(1) if reverse else t[..., ::21]
    exact = by_doubling(ahead(a), ahead(b), h0[:, ::21])
    assert_close("h", ahead(h).double(), exact, {torch.float32: 2e-7, torch.bfloat16: 3e-3}[dtype])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
def test_scans_that_overlap_wait_for_each_other(diagonal_rnn, dtype):
    """A scan by clusters starts while the one before it ends: its input, and memory that is reused."""
    scan = diagonal_rnn.linear_scan
    a, b, h0 = draw((1, 700, 512), None, dtype)
    a, results = 0.3 * a, []
    for wait in (True, False):
        h = b
        for _ in range(60):
            h = 0.2 * scan(a, scan(a, scan(a, h, h0), h0, reverse=True)) + 0.2 * scan(a, h, h0)
            if wait:
                torch.cuda.synchronize()
        results.append(h)
    assert results[0].isfinite().all()
    assert_bitwise("h", results[1], results[0])


# One shape for each kernel of a scan and number of blocks in its clusters
REPEATED = [(2, 300, 40), (1, 5000, 512), (40, 300, 128), (2, 300, 33), (9, 9, 3704), (9, 9, 3701)]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", REPEATED, ids=str)
def test_bits_repeat_and_are_captured(diagonal_rnn, shape, reverse, dtype):
    """Bitwise the same, forward and backward, while other work is running, and replayed on new
    input."""
    given = [t.requires_grad_() for t in draw(shape, None, dtype)]
    dh, stream, b = torch.randn(shape, dtype=dtype), torch.cuda.Stream(), given[1]

    def once():
        h = diagonal_rnn.linear_scan(*given, reverse=reverse)
        # Detached: a graph that stayed alive would tie its leaves to the stream on which it was
        # made.
        return h.detach(), *torch.autograd.grad(h, given, dh)

    def check(found, wanted):
        for key, got, want in zip(("h", "da", "db", "dh0"), found, wanted, strict=True):
            assert_bitwise(key, got, want)

    first, noise = once(), torch.randn(1024, 1024)
    for _ in range(3):
        with torch.cuda.stream(stream):
            noise @ noise
        check(once(), first)
    torch.cuda.synchronize()
    for captured, eager in replayed(once, lambda: b.copy_(torch.randn_like(b)), times=2):
        check(captured, eager)
