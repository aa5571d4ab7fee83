"""Compares another package's model with itself after `flashcell.accelerate`: values, gradients, time.

A script of this folder has a table of models with random weights and ends in `compare(models)`; each
entry is a function that returns the model and a function that runs it and returns a tensor. It prints
one line of JSON. Errors are root mean squares, relative to those of the model's own values.
"""

import argparse
import copy
import itertools
import json
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Run = Callable[[nn.Module], Tensor]
Models = dict[str, Callable[..., tuple[nn.Module, Run]]]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compare(
    models: Models, train: tuple[str, ...] = ("cpu", "cuda"), by_device: bool = False
) -> None:
    """`train`: devices on which gradients are compared, too. With `by_device` an entry of `models` takes
    the device's type, because the package has code of its own for CUDA, which has gradients in training
    mode alone (the models have no dropout)."""
    parser = argparse.ArgumentParser(
        description="compares a model with itself on flashcell's kernels"
    )
    parser.add_argument("model", choices=models)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.0, help="time each side for so long")
    parser.add_argument(
        "--at-best", action="store_true", help="also time the model with kernels that cost nothing"
    )
    arguments = parser.parse_args()
    if arguments.at_best and not arguments.seconds:
        parser.error("--at-best needs --seconds")
    device = torch.device(arguments.device)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the programs draw from the global generator
    torch.manual_seed(0)
    model, run = models[arguments.model](*[device.type][: int(by_device)])
    model.to(device).eval()

    import flashcell

    log = Lines()
    logger = logging.getLogger("flashcell")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    # By name, so that the kernels run where "auto" would leave a call to torch.nn, too.
    ours = flashcell.accelerate(copy.deepcopy(model), backend=device.type)
    logger.removeHandler(log)
    swapped = [name for name, m in ours.named_modules() if is_ours(m)]
    result = {"model": arguments.model, "swapped": len(swapped), "kind": kinds(ours)}
    result["log"] = log.lines
    result["same_state_dict"] = same_state(model, ours)
    with torch.no_grad():
        want, got = run(model), run(ours)
    result["error"] = relative(got, want)
    if device.type in train:
        got_all, want_all = (gradients(m, run, by_device) for m in (ours, model))
        result["gradient_error"] = relative(join(got_all), join(want_all))
        # Elsewhere a model may have gradients so large that these would not be seen.
        inside = [n for n in want_all if n.startswith(tuple(swapped))]
        error = relative(join(got_all, inside), join(want_all, inside))
        result["gradient_error_inside"] = error
    if arguments.seconds:
        flashcell.accelerate(ours)  # backend "auto": what a user gets
        with torch.no_grad():
            result["ms"] = times(run, model, ours, arguments.seconds)
        if device.type in train:
            result["training_ms"] = times(
                lambda m: gradients(m, run, by_device), model, ours, arguments.seconds
            )
        if arguments.at_best:
            with torch.no_grad():
                free = without_cells(ours, run)
                result["at_best_ms"] = times(run, model, free, arguments.seconds)[1]
    flashcell.restore(ours)
    with torch.no_grad():
        result["restored"] = torch.equal(run(ours), want) and kinds(ours) == ""
    print(json.dumps(result))


def is_ours(module: nn.Module) -> bool:
    return "_accelerated" in vars(module) or "_replaced" in vars(module)


def kinds(model: nn.Module) -> str:
    return ", ".join(sorted({type(m).__name__ for m in model.modules() if is_ours(m)}))


def same_state(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def gradients(model: nn.Module, run: Run, training: bool) -> dict[str, Tensor]:
    model.train(training).zero_grad()
    y = run(model)
    model.eval()
    # Not a ramp, of which the sums over time that a convolution makes would cancel.
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    (y * weight).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def join(gradients: dict[str, Tensor], names: list[str] | None = None) -> Tensor:
    return torch.cat([gradients[n].flatten() for n in (gradients if names is None else names)])


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return ((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()).item()


def without_cells(model: nn.Module, run: Run) -> nn.Module:
    """Returns a copy whose kernels return what they return in one run, without computing it."""
    free = copy.deepcopy(model)
    calls: list[tuple[nn.Module, str, list[Any]]] = []
    for module in filter(is_ours, free.modules()):
        name = "run_cell" if hasattr(module, "run_cell") else "forward"
        calls.append((module, name, []))
        setattr(module, name, keeping(getattr(module, name), calls[-1][2]))
    run(free)
    for module, name, returned in calls:
        again = itertools.cycle(returned)
        setattr(module, name, lambda *_, results=again, **__: next(results))
    return free


def keeping(function: Callable[..., Any], returned: list[Any]) -> Callable[..., Any]:
    """Returns the function, which then appends to `returned` what it returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        returned.append(function(*args, **kwargs))
        return returned[-1]

    return call


def times(run: Run, model: nn.Module, ours: nn.Module, seconds: float) -> tuple[float, float]:
    """Returns the milliseconds of both, run in turns: the fastest tenth of each, because other programs
    that run on the machine only ever add to them."""
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end or len(taken[1]) < 3:
        for side, which in zip(taken, (model, ours), strict=True):
            start = time.perf_counter()
            run(which)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            side.append(1e3 * (time.perf_counter() - start))
    before, after = (round(float(np.quantile(side, 0.1)), 3) for side in taken)
    return before, after
