"""Fits the costs of flashcell's table (modeling/choice/cost_model.py) to measured times."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.grid import draw
from flashcell.choice.backend_choice import with_engine
from flashcell.choice.cost_model import (
    AMOUNTS,
    KINDS,
    PRECISIONS,
    Call,
    amounts,
    groups,
    predict,
)

ENOUGH = 20  # calls from which a group has costs of its own; fewer share those of all precisions
ROUNDS = 5  # of weights that turn a least-squares fit into one of relative errors
PARTS = 5  # of the calls; each is predicted from the others to choose the margin
LOSS = 5  # how much more a loss counts than a gain of the same factor
MARGINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
SLOWER = 0.97  # a ratio below is a loss
# What a module with backend="auto" adds to torch.nn's forward where it chooses it: 30 to 45 us on a
# GPU's host and on a CPU.
CHOICE_US = 35.0


class Measured(NamedTuple):
    """A call and what it took, in microseconds."""

    call: Call
    torch_us: float
    kernel_us: float

    @property
    def ratio(self) -> float:
        return self.torch_us / self.kernel_us

    @property
    def torch_ratio(self) -> float:
        """The ratio where torch.nn's forward is chosen."""
        return self.torch_us / (self.torch_us + CHOICE_US)

    def time(self, side: int) -> float:
        return self.kernel_us if side else self.torch_us + CHOICE_US


class Outcome(NamedTuple):
    """What a table's choices would make of measured calls."""

    calls: int
    mean: float  # geometric, of the ratios
    best: float  # the same if every choice were right
    slower: float  # share of the ratios below SLOWER
    worst: float
    torch: float  # share of the calls that run torch.nn's forward

    def __str__(self) -> str:
        return (
            f"{self.calls} calls: geometric mean {self.mean:.2f} (always right {self.best:.2f}), "
            f"{self.slower:.1%} below {SLOWER}, worst {self.worst:.2f}, torch chosen {self.torch:.1%}"
        )


def as_call(call: draw.Call, device: str, capability: int) -> Call:
    """Returns the sizes by which the rule decides of a call of the grid."""
    kind, options = draw.NETS[call.net]
    layers = options.get("num_layers", 1)
    directions = 2 if options.get("bidirectional") else 1
    projection = max(1, call.width // 2) if call.net == "lstm-proj" else 0
    packed, batch = call.net == "lstm-packed", call.batch
    if packed:  # the rule sees rows and steps
        batch = -(-int(draw.lengths(call).sum()) // call.steps)
    rounds = device == "cuda" and call.net not in draw.CELLS  # fp32 products, to TF32, by default
    names = {"exact": "fp32", "fp32": "tf32" if rounds else "fp32"}
    name = names.get(call.precision, call.precision)
    sizes = layers, directions, projection, batch, call.steps, call.width, call.width
    trains = int(call.mode == "training")
    found = Call(KINDS.index(kind), *sizes, PRECISIONS.index(name), trains, int(packed))
    asks = device == "cuda" and call.net not in draw.CELLS
    return with_engine(found, capability) if asks else found


def from_rows(rows: Iterable[dict[str, str]], device: str) -> list[Measured]:
    """Returns the calls of a CSV file that scripts/bench_grid wrote."""
    found = []
    for row in rows:
        sizes = (int(row[name]) for name in ("batch", "steps", "width"))
        call = draw.Call(row["net"], *sizes, row["precision"], row["mode"])
        times = (1e3 * float(row[name]) for name in ("torch_ms", "kernel_ms"))
        found.append(Measured(as_call(call, device, int(row["capability"])), *times))
    return found


def nonnegative(matrix: Tensor, target: Tensor) -> Tensor:
    """Returns the least-squares solution without negative entries (Lawson and Hanson 1974)."""
    count = matrix.shape[1]
    solution, free = matrix.new_zeros(count), torch.zeros(count, dtype=torch.bool)
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[free] = -math.inf
        at = int(gradient.argmax())
        if not gradient[at] > 1e-9:
            break
        free[at] = True
        while True:
            trial = matrix.new_zeros(count)
            trial[free] = torch.linalg.lstsq(
                matrix[:, free], target[:, None], driver="gelsd"
            ).solution[:, 0]
            low = free & (trial <= 0)
            if not low.any():
                break
            step = (solution[low] / (solution[low] - trial[low])).min()
            solution = solution + step * (trial - solution)
            free &= solution > 1e-12
            solution[~free] = 0
            if not free.any():
                break
        solution = trial.clamp_min(0) if free.any() else solution
    return solution


def fit_costs(calls: Sequence[Call], times: Sequence[float]) -> dict[str, float]:
    """Returns the costs in microseconds that predict `times` with the least relative errors."""
    matrix = torch.tensor([amounts(c) for c in calls], dtype=torch.float64)
    target = torch.tensor(times, dtype=torch.float64)
    scale = matrix.amax(0).clamp_min(1e-30)
    matrix, weight = matrix / scale, 1 / target
    for _ in range(ROUNDS):
        costs = nonnegative(matrix * weight[:, None], target * weight)
        # The square of (p - t)^2 / (p t) is near that of log(p / t), so that too long and too short
        # predictions count alike.
        weight = 1 / (target * (matrix @ costs).clamp_min(1e-3)).sqrt()
    found = (costs / scale).tolist()
    return {name: float(f"{c:.4g}") for name, c in zip(AMOUNTS, found, strict=True) if c > 0}


def fit_side(measured: Sequence[Measured], device: str, side: int) -> dict[str, dict[str, float]]:
    """Returns the costs of each group of calls, for torch.nn's forward as "auto" runs it (0) or our
    kernels (1)."""
    members: dict[str, list[Measured]] = {}
    shared: dict[str, list[Measured]] = {}
    for one in measured:
        group = groups(one.call, device)[side]
        members.setdefault(group, []).append(one)
        shared.setdefault(group.rpartition(" ")[0], []).append(one)
    costs = {}
    for group, those in sorted(members.items()):
        alike = those if len(those) >= ENOUGH else shared[group.rpartition(" ")[0]]
        costs[group] = fit_costs([m.call for m in alike], [m.time(side) for m in alike])
        if alike is not those:  # the sum of all precisions, times how this one differs
            apart = [m.time(side) / _time(costs[group], m.call) for m in those]
            factor = statistics.median(apart)
            costs[group] = {k: float(f"{c * factor:.4g}") for k, c in costs[group].items()}
    return costs


def _time(costs: dict[str, float], call: Call) -> float:
    sizes = zip(AMOUNTS, amounts(call), strict=True)
    return sum(costs.get(name, 0.0) * amount for name, amount in sizes)


Guesses = list[tuple[Measured, float]]  # calls and the ratios that were predicted for them


def fit_entry(
    measured: Sequence[Measured], about: dict[str, Any], guesses: Guesses
) -> dict[str, Any]:
    """Returns the entry of the table for the device on which the calls were measured.

    `about` has its device, name, capability, units and source; `guesses` are those of held_out."""
    torch_costs, kernel_costs = (fit_side(measured, about["device"], side) for side in (0, 1))
    costs = {"torch": torch_costs, "kernel": kernel_costs}
    return {**about, "margin": best_margin(guesses), **costs}


def held_out(
    measured: Sequence[Measured], about: dict[str, Any], alike: Sequence[Measured] = ()
) -> Guesses:
    """Returns each call with the ratio that costs fitted to the other parts of the calls, and to those
    of devices that are alike, predict."""
    found = []
    for part in range(PARTS):
        rest = [m for n, m in enumerate(measured) if n % PARTS != part] + list(alike)
        sides = [fit_side(rest, about["device"], side) for side in (0, 1)]
        entry = {**about, "margin": 1.0, "torch": sides[0], "kernel": sides[1]}
        for one in measured[part::PARTS]:
            guess = predict(entry, one.call)
            found.append((one, math.inf if guess is None else guess.torch_us / guess.kernel_us))
    return found


def outcome(choices: Iterable[tuple[Measured, bool]]) -> Outcome:
    """Says what choices of torch.nn's forward (True) or our kernels come to."""
    choices = list(choices)
    ratios = [m.torch_ratio if torch_runs else m.ratio for m, torch_runs in choices]
    mean = lambda values: math.exp(statistics.fmean(map(math.log, values)))
    return Outcome(
        len(ratios),
        mean(ratios),
        mean([max(m.torch_ratio, m.ratio) for m, _ in choices]),
        sum(r < SLOWER for r in ratios) / len(ratios),
        min(ratios),
        sum(torch_runs for _, torch_runs in choices) / len(choices),
    )


def best_margin(guesses: Guesses) -> float:
    """Returns the margin with the largest mean of the logarithms of the held-out calls' ratios, of
    which those below 1 count LOSS times; of several equal ones that nearest to 1."""

    def value(margin: float) -> float:
        logs = [math.log(m.torch_ratio if r < margin else m.ratio) for m, r in guesses]
        return statistics.fmean(x if x > 0 else LOSS * x for x in logs)

    return max(sorted(MARGINS, key=lambda margin: abs(math.log(margin))), key=value)
