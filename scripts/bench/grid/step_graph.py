"""An LSTM's forward pass by simple means, to compare with: at each step a product of torch's and one
pointwise kernel, all steps in one CUDA graph."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from bench.grid.draw import DTYPES, Call

SIZES = (  # batch, steps, width
    (1024, 200, 1150), (1024, 200, 650), (1024, 200, 300), (128, 200, 1150), (128, 200, 650),
    (256, 128, 1024), (512, 50, 256), (128, 1024, 768), (64, 1024, 768),
)  # fmt: skip
CALLS = tuple(
    Call("lstm", *size, precision, "inference") for precision in ("bf16", "fp32") for size in SIZES
)
MOST_UNITS = 512  # of a program of the kernel


@triton.jit
def cells(
    product,  # [B, 4 D] fp32 or bf16: h of the step before, multiplied
    x,  # [B, 4 D]: this step's input, multiplied
    bias,  # [4 D] fp32
    c,  # [B, D] fp32
    h,  # [B, D]
    D: tl.constexpr,
    UNITS: tl.constexpr,
):
    row, unit = tl.program_id(0), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < D
    first = row * 4 * D
    i = _gate(product, x, bias, first, unit, inside)
    f = _gate(product, x, bias, first, D + unit, inside)
    z = _gate(product, x, bias, first, 2 * D + unit, inside)
    o = _gate(product, x, bias, first, 3 * D + unit, inside)
    state = tl.sigmoid(f) * tl.load(c + row * D + unit, inside)
    state += tl.sigmoid(i) * (2 * tl.sigmoid(2 * z) - 1)
    tl.store(c + row * D + unit, state, inside)
    y = tl.sigmoid(o) * (2 * tl.sigmoid(2 * state) - 1)
    tl.store(h + row * D + unit, y.to(h.dtype.element_ty), inside)


@triton.jit
def _gate(product, x, bias, first, unit, inside):
    there = tl.load(product + first + unit, inside).to(tl.float32)
    return there + tl.load(x + first + unit, inside).to(tl.float32) + tl.load(bias + unit, inside)


def _padded(weight: Tensor, width: int) -> Tensor:
    """Returns the gates' rows of weight [4 H] or [4 H, H] with zeros up to `width` units each."""
    gates = weight.detach().unflatten(0, (4, -1))
    H = gates.shape[1]
    pads = (0, width - H) if gates.dim() == 2 else (0, width - H, 0, width - H)
    return nn.functional.pad(gates, pads).flatten(0, 1).contiguous()


def time_graph(call: Call, times: int = 10) -> float:
    """Returns the milliseconds of the graph: the median of several replays.

    A replay begins with what the one before left in the L2 cache, and takes the host no time. The
    input lies in the order of time, and is padded to a multiple of 8 units before the time is taken,
    as are the weights."""
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee" if call.precision == "exact" else "tf32"
    try:
        return _time_graph(call, times)
    finally:
        products.fp32_precision = before


def _time_graph(call: Call, times: int) -> float:
    torch.manual_seed(0)
    dtype, H, B, T = DTYPES[call.precision], call.width, call.batch, call.steps
    D = triton.cdiv(H, 8) * 8
    given = nn.LSTM(H, H, device="cuda", dtype=dtype)
    W, R = _padded(given.weight_ih_l0, D), _padded(given.weight_hh_l0, D)
    bias = _padded((given.bias_ih_l0 + given.bias_hh_l0).float(), D)
    new: Any = torch.empty
    x = nn.functional.pad(torch.randn(T, B, H, device="cuda", dtype=dtype), (0, D - H))
    projected, product = (new(n, 4 * D, device="cuda", dtype=dtype) for n in (T * B, B))
    c, h = torch.zeros(B, D, device="cuda"), torch.zeros(T + 1, B, D, device="cuda", dtype=dtype)
    units = min(MOST_UNITS, triton.next_power_of_2(D))

    def run() -> None:
        c.zero_()
        torch.mm(x.view(T * B, D), W.t(), out=projected)
        for t in range(T):
            torch.mm(h[t], R.t(), out=product)
            at = projected[t * B : (t + 1) * B]
            cells[(B, triton.cdiv(D, units))](product, at, bias, c, h[t + 1], D, units)

    with torch.no_grad():
        return _replayed(run, times)


def _replayed(run: Callable[[], None], times: int) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(times + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[1:])
