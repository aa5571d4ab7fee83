"""Times calls on a GPU with events, warm-up and medians, or many short ones as one CUDA graph."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

WARM_SECONDS = 0.03  # after this the clocks have risen
SLOW = 100.0  # ms; longer calls are sampled less often
L2_BYTES = 60 * 2**20


class Sample(NamedTuple):
    """One measurement: ms of a call, ms of the host to enqueue it, peak MiB allocated."""

    p20: float
    p50: float
    p80: float
    count: int
    host: float = float("nan")
    peak: float = float("nan")


NOT_TIMED = Sample(*(float("nan"),) * 3, 0)


def summarize(times: list[float], host: float, peak: float) -> Sample:
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1:8:3]
    return Sample(p20, p50, p80, len(times), host, peak)


def copies_beyond_l2(size: int, most: int = 64) -> int:
    """Returns how many buffers of `size` bytes to cycle through, so that none stays in the L2
    cache."""
    return max(1, min(most, -(-2 * L2_BYTES // max(size, 1))))


def time_calls(call: Callable[[int], Any], device: str, budget: float) -> Sample:
    """Times call(k) for k = 0, 1, ...: enqueues them in sequence, with an event before and after
    each.

    At least 7 samples (3 of what takes more than 100 ms), for about `budget` seconds.
    """
    if device != "cuda":
        call(0)
        return NOT_TIMED
    end, done = time.perf_counter() + WARM_SECONDS, 0
    while done < 2 or time.perf_counter() < end:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call(done)
        torch.cuda.synchronize()
        once, done = (time.perf_counter() - start) * 1e3, done + 1
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    count = 3 if once > SLOW else int(max(7, min(50, budget * 1e3 / once)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    gc.disable()
    start = time.perf_counter()
    for k in range(count):
        events[2 * k].record()
        call(k)
        events[2 * k + 1].record()
    host = (time.perf_counter() - start) * 1e3 / count
    torch.cuda.synchronize()
    gc.enable()
    times = [events[2 * k].elapsed_time(events[2 * k + 1]) for k in range(count)]
    return summarize(times, host, peak)


def time_graph(steps: list[Callable[[], Any]], device: str) -> Sample:
    """Times `steps` as one replayed CUDA graph; returns milliseconds per step."""
    if device != "cuda":
        for step in steps:
            step()
        return NOT_TIMED
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for step in steps:
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = [step() for step in steps]
    sample = time_calls(lambda k: graph.replay(), device, 0.1)
    del outputs
    per = len(steps)
    return Sample(sample.p20 / per, sample.p50 / per, sample.p80 / per, sample.count)
