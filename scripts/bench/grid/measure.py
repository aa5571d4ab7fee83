"""Times one call of torch.nn's module and of flashcell's in turns, and compares their outputs."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flashcell
from bench.grid.draw import CELLS, DTYPES, NETS, Call

FLUSH_BYTES = 256 * 2**20  # written before each timed call, to empty the L2 cache
ROUNDS = {"cuda": (3, 9), "cpu": (3, 7)}  # least and most timed calls of a module
SECONDS = 0.25  # after this, no timed calls beyond the least number
HOST_SECONDS = 0.02  # during which calls are repeated to time the host


class Times(NamedTuple):
    """The times of torch.nn's call and of ours, the host's part of each, and their difference."""

    torch_ms: float
    ours_ms: float
    torch_host_ms: float
    ours_host_ms: float
    error: float  # the largest difference of the outputs, divided by the largest output

    @property
    def ratio(self) -> float:
        """Returns torch.nn's time divided by ours: above 1 ours is faster."""
        return self.torch_ms / self.ours_ms


def make_modules(call: Call, device: str) -> tuple[nn.Module, nn.Module]:
    """Returns torch.nn's module and flashcell's, with the same parameters."""
    kind, options = NETS[call.net]
    if call.net not in CELLS:
        options = {**options, "batch_first": True}
    if call.net == "lstm-proj":
        options = {**options, "proj_size": max(1, call.width // 2)}
    dtype = DTYPES[call.precision]
    reference = getattr(nn, kind)(call.width, call.width, **options).to(device, dtype)
    ours = getattr(flashcell, kind)(call.width, call.width, **options).to(device, dtype)
    ours.load_state_dict(reference.state_dict())
    if device == "cuda" and call.net not in CELLS:
        reference.flatten_parameters()
    return reference, ours


def make_input(call: Call, device: str) -> Any:
    """Returns the call's input: a tensor, or a PackedSequence of lengths between T / 2 and T."""
    dtype = DTYPES[call.precision]
    if call.net in CELLS:
        return torch.randn(call.batch, call.width, device=device, dtype=dtype)
    x = torch.randn(call.batch, call.steps, call.width, device=device, dtype=dtype)
    if call.net != "lstm-packed":
        return x
    lengths = torch.linspace(call.steps, (call.steps + 1) // 2, call.batch).long()
    return pack_padded_sequence(x, lengths, batch_first=True)


def output_of(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    return output.data if isinstance(output, PackedSequence) else output


def make_step(module: nn.Module, x: Any, mode: str) -> Callable[[], Tensor]:
    """Returns a function that calls the module once. In training mode it first sets the gradients of
    the weights to None, and then also runs the backward pass."""

    def infer() -> Tensor:
        with torch.no_grad():
            return output_of(module(x))

    def train() -> Tensor:
        module.zero_grad(set_to_none=True)
        output = output_of(module(x))
        output.backward(gradient[: output.shape[0]])
        return output

    if mode == "inference":
        return infer
    gradient = torch.ones_like(infer())
    return train


def time_one(step: Callable[[], Tensor], flush: Tensor | None) -> float:
    """Returns the milliseconds of a call, on a GPU from an empty queue until the GPU is done."""
    if flush is None:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    flush.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def time_host(step: Callable[[], Tensor], once_ms: float, device: str) -> float:
    """Returns the milliseconds that the host takes to enqueue a call: the least of several times."""
    if device == "cpu":
        return once_ms
    times = []
    for _ in range(max(2, min(20, int(HOST_SECONDS * 1e3 / max(once_ms, 1e-3))))):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return min(times)


def measure(call: Call, device: str) -> Times:
    """Times both modules in turns, after warm-up calls, and returns the medians."""
    torch.manual_seed(0)
    torch.backends.cudnn.rnn.fp32_precision = "ieee" if call.precision == "exact" else "tf32"
    x = make_input(call, device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None
    steps = [make_step(module, x, call.mode) for module in make_modules(call, device)]
    expected, found = (step().detach().float() for step in steps)
    scale = max(expected.abs().max().item(), 1e-6)
    error = (expected - found).abs().max().item() / scale
    del expected, found
    for step in steps:
        step()
    least, most = ROUNDS[device]
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < start + SECONDS):
        rounds.append([time_one(step, flush) for step in steps])
    reference, ours = (statistics.median(times) for times in zip(*rounds, strict=True))
    hosts = [
        time_host(step, once, device) for step, once in zip(steps, (reference, ours), strict=True)
    ]
    return Times(reference, ours, hosts[0], hosts[1], error)
