"""Profiles a training step on the GPU with torch.profiler."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LINES = 24
NAME = 90


def profile_step(step: Callable[[], Any], usual_ms: float) -> str:
    """Returns tables of one step's kernels and of the operators that launched them.

    "idle" is `usual_ms`, the step's time without the profiler, minus the time of all kernels.
    """
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name].append(event.device_time_total / 1e3)
    operators = {
        event.key: (event.self_device_time_total / 1e3, event.count)
        for event in seen.key_averages()
        if event.device_type == DeviceType.CPU and event.self_device_time_total
    }
    totals = {name: (sum(times), len(times)) for name, times in kernels.items()}
    busy = sum(ms for ms, _ in totals.values())
    launches = sum(count for _, count in totals.values())
    idle = max(0.0, 1 - busy / usual_ms)
    head = f"{busy:.1f} ms in {launches} kernels, idle {idle:.1%} of {usual_ms:.1f} ms"
    return "\n".join([head, *table("kernel", totals, busy), *table("operator", operators, busy)])


def table(title: str, totals: dict[str, tuple[float, int]], whole: float) -> list[str]:
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  {title}"]
    most = sorted(totals.items(), key=lambda item: -item[1][0])
    for name, (ms, count) in most[:LINES]:
        lines.append(f"{ms:9.3f} {ms / max(whole, 1e-9):6.1%} {count:6}  {name[:NAME]}")
    return lines
