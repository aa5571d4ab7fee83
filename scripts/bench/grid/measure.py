"""Times one call of torch.nn's module and of flashcell's in turns, and compares their outputs."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flashcell
from bench.grid.draw import CELLS, DTYPES, NETS, Call, lengths

FLUSH_BYTES = 256 * 2**20  # written before each timed call, to empty the L2 cache
ROUNDS = (3, 101)  # least and most timed calls of a module
SECONDS = 0.25  # after this, no timed calls beyond the least number
HOST_SECONDS = 0.02  # during which calls are repeated to time the host
NAMES = ("torch", "kernel", "auto")  # torch.nn, our kernels, and what backend="auto" chooses


class Times(NamedTuple):
    """The times of torch.nn's call, of our kernels' and of backend="auto", and the host's part."""

    torch_ms: float
    kernel_ms: float
    auto_ms: float
    torch_host_ms: float
    kernel_host_ms: float
    auto_host_ms: float
    ratio: float  # torch.nn's time divided by that of "auto": above 1 ours is faster
    rounds: int
    error: float  # the largest difference of the outputs of "auto", divided by the largest output
    choice: str  # what "auto" ran: "torch" or "kernel"


def make_modules(call: Call, device: str) -> dict[str, nn.Module]:
    """Returns torch.nn's module and two of flashcell's, by NAMES, with the same parameters."""
    kind, options = NETS[call.net]
    if call.net not in CELLS:
        options = {**options, "batch_first": True}
    if call.net == "lstm-proj":
        options = {**options, "proj_size": max(1, call.width // 2)}
    dtype = DTYPES[call.precision]
    sizes, options = (call.width, call.width), {**options, "device": device, "dtype": dtype}
    made: dict[str, nn.Module] = {"torch": getattr(nn, kind)(*sizes, **options)}
    for name, backend in (("kernel", device), ("auto", "auto")):
        made[name] = getattr(flashcell, kind)(*sizes, **options, backend=backend)
        made[name].load_state_dict(made["torch"].state_dict())
    return made


def make_input(call: Call, device: str) -> Any:
    """Returns the call's input: a tensor, or a PackedSequence of lengths between T / 2 and T."""
    dtype = DTYPES[call.precision]
    if call.net in CELLS:
        return torch.randn(call.batch, call.width, device=device, dtype=dtype)
    x = torch.randn(call.batch, call.steps, call.width, device=device, dtype=dtype)
    if call.net != "lstm-packed":
        return x
    return pack_padded_sequence(x, lengths(call), batch_first=True)


def make_states(call: Call, module: nn.Module, device: str) -> Any:
    """Returns initial states as the module takes them: h, or (h, c) for an LSTM."""
    shape: tuple[int, ...] = (call.batch,)
    widths = [call.width] * (2 if "lstm" in call.net else 1)
    if isinstance(module, nn.RNNBase):
        shape = (module.num_layers * (2 if module.bidirectional else 1), call.batch)
        widths[0] = module.proj_size or call.width
    states = [torch.randn(*shape, n, device=device, dtype=DTYPES[call.precision]) for n in widths]
    return tuple(states) if len(states) > 1 else states[0]


def output_of(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    return output.data if isinstance(output, PackedSequence) else output


def make_step(module: nn.Module, x: Any, hx: Any, mode: str) -> Callable[[], Tensor]:
    """Returns a function that calls the module once. In training mode it first sets the gradients of
    the weights to None, and then also runs the backward pass."""

    def infer() -> Tensor:
        with torch.no_grad():
            return output_of(module(x, hx))

    def train() -> Tensor:
        module.zero_grad(set_to_none=True)
        output = output_of(module(x, hx))
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


def measure(call: Call, device: str, names: tuple[str, ...] = NAMES, states: bool = False) -> Times:
    """Times the modules in turns, after warm-up calls; without "auto" our kernels' times stand for it.
    With `states` the calls get initial states.

    Times are medians. The ratio is the median of the ratios of neighbouring calls, which differ less
    than the medians do if other programs or the clock change the machine's speed meanwhile."""
    torch.manual_seed(0)
    torch.backends.cudnn.rnn.fp32_precision = "ieee" if call.precision == "exact" else "tf32"
    x = make_input(call, device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None
    modules = make_modules(call, device)
    hx = make_states(call, modules["torch"], device) if states else None
    steps = {name: make_step(modules[name], x, hx, call.mode) for name in names}
    with torch.set_grad_enabled(call.mode == "training"):
        choice = flashcell.explain(modules["auto"], x, hx).partition(":")[0]
    last = names[-1]
    outputs = {name: steps[name]().detach().float() for name in ("torch", last)}
    scale = max(outputs["torch"].abs().max().item(), 1e-6)
    error = (outputs["torch"] - outputs[last]).abs().max().item() / scale
    del outputs
    for step in steps.values():
        step()
    rounds: list[dict[str, float]] = []
    # The order changes, so that none of the modules always follows the same one.
    orders = itertools.cycle(itertools.permutations(names))
    start = time.perf_counter()
    while len(rounds) < ROUNDS[0] or (
        len(rounds) < ROUNDS[1] and time.perf_counter() < start + SECONDS
    ):
        rounds.append({name: time_one(steps[name], flush) for name in next(orders)})
    times = {name: statistics.median(r[name] for r in rounds) for name in names}
    hosts = {name: time_host(steps[name], times[name], device) for name in names}
    ratio = statistics.median(r["torch"] / r[last] for r in rounds)
    all_times = (found.get(name, found[last]) for found in (times, hosts) for name in NAMES)
    return Times(*all_times, ratio, len(rounds), error, choice)
