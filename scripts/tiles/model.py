"""The limits of the CUDA engines as an integer constraint problem, solved with OR-tools CP-SAT.

One model holds any number of cases (a pass of a cell, a width, a GPU) that share the variables of
an engine: with one case it is the best plan for that shape, with all of them the constants that one
binary needs. Symbols: D width, e bytes of an element, r row tiles of 16 units, p panels, u = units /
16, w warps. All divisions round up unless said.

  grid engine                                        what a thread block holds, in bytes
    blocks  = D / units        <= SMs                        partials 2 w u 8 4 floats(r)
    depth   = D e / 64 w       <= 16                         ring     stages inputs 8 units e
    chunks  = depth p;  chunks r u <= unrolled               carried  tiles (states + sums) 8 units 4
    spilt   = max(0, chunks - floor(held / 8 r u))           weight   spilt r u 1024 w
    weights + working <= min(255, 65536 / 32 w)              their sum <= shared memory of a block
    inputs 8 units e / 16 <= 32 w,  8 units <= 128         a thread copies one vector, runs one unit

  block engine, compiled for widths W in 32, 64, 128, ..
    threads = 4 W forward (8 units a warp), 2 W backward (16)      <= 1024
    words of weight a lane + working                               <= min(255, 65536 / threads)
    operand + stages inputs row + 2 outputs row                    <= shared memory of a block

`working` is what a lane needs besides weights: an estimate until ptxas has measured it (its
registers, and four bytes spilt for each it lacked, less the weights); then the problem is solved again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ortools.sat.python import cp_model

from flashcell.kernels.fused_rnn.devices import Device
from flashcell.kernels.fused_rnn.tiles import GRID
from tiles import sizes

WORKING = 104  # registers of a lane besides weights, an estimate before ptxas
LATENCY_STAGES = 6  # hides a load of 1 us behind steps of 0.25 us; one more is being read
HIDDEN_TILES = 8  # other tiles, 0.1 us each, that hide a tile's exchange of 0.7 us
# Clocks of an SM, in quarters: 6.5 for a matrix instruction on each of 4 tensor cores, 128 bytes of
# shared memory, 64 bytes from L2, 16 non-linearities.
MMA, SHARED, L2 = 26, 4, 4
BATCH_TILES = 2  # tiles of 8 sequences in the reference batch of 16

DOMAINS = {
    "units": range(16, 65, 16),
    "warps": (4, 8, 16),
    "tiles": range(1, 17),
    "stages": range(3, 13),
    "held": range(0, 225, 16),
}


@dataclass(frozen=True)
class Case:
    """One pass of a cell for heads of width D on a device."""

    shape: sizes.Shape
    D: int
    device: Device
    working: int = WORKING


@dataclass
class Solution:
    values: dict[str, int]
    objective: int
    cost: int  # clocks of all cases' steps
    fits: list[bool]  # whether each case fits


class Builder:
    """A CP-SAT model builder that names its expressions."""

    def __init__(self) -> None:
        self.model = cp_model.CpModel()
        self.count = 0

    def new(self, most: int, least: int = 0) -> cp_model.IntVar:
        self.count += 1
        return self.model.new_int_var(least, most, f"v{self.count}")

    def choice(self, name: str, values: object, pin: int | None) -> cp_model.IntVar:
        allowed = [pin] if pin is not None else list(values)  # type: ignore[call-overload]
        domain = cp_model.Domain.from_values(allowed)
        return self.model.new_int_var_from_domain(domain, name)

    def product(self, *factors: object, most: int = 10**7) -> cp_model.IntVar:
        result = self.new(most)
        self.model.add_multiplication_equality(result, factors)
        return result

    def quotient(self, a: object, b: object, up: bool = True, least: int = 0) -> cp_model.IntVar:
        result = self.new(10**4, least)
        self.model.add_division_equality(result, a + b - 1 if up else a, b)
        return result


def solve(cases: list[Case], pins: dict[str, int], must_fit: bool = True) -> Solution | None:
    """Solves for the grid engine's tiles for all cases at once; None if there is no solution.

    Each value of `units`, `warps` and `held` is solved apart, as the three multiply or divide all
    other variables: one solve over everything takes minutes instead of seconds.
    """
    names = ("units", "warps", "held")
    choices = [[pins[n]] if n in pins else list(DOMAINS[n]) for n in names]
    branches = [{**pins, **dict(zip(names, c, strict=True))} for c in itertools.product(*choices)]
    found = [s for branch in branches if (s := _solve(cases, branch, pins, must_fit))]
    return min(found, key=lambda s: s.objective, default=None)


def _solve(
    cases: list[Case], branch: dict[str, int], pins: dict[str, int], must_fit: bool
) -> Solution | None:
    b = Builder()
    m = b.model
    units, warps, tiles, stages, held = (
        b.choice(name, domain, branch.get(name)) for name, domain in DOMAINS.items()
    )
    u = b.quotient(units, 16, up=False, least=1)
    m.add(8 * units <= 32 * sizes.CELL_WARPS)  # a thread for each unit and column
    share = b.quotient(sizes.BLOCK_REGISTERS, 32 * warps, up=False)  # registers of a lane
    chunks_most = pins.get("chunks", GRID["chunks"])
    costs, fits = [], []
    for case in cases:
        s, D = case.shape, case.D
        fit = m.new_bool_var(f"fits{len(fits)}")
        fits.append(fit)
        limit = lambda expression, fit=fit: m.add(expression).only_enforce_if(fit)
        if D * s.element % sizes.VECTOR:
            m.add(fit == 0)
        r = s.row_tiles * u
        blocks = b.quotient(D, units, least=1)
        depth = b.quotient(D * s.element, sizes.CHUNK_BYTES * warps)
        limit(blocks <= case.device.sms)
        limit(depth <= pins.get("blocks", GRID["blocks"]))
        limit(s.panels * s.row_tiles * b.product(depth, u) <= chunks_most)
        kept = b.quotient(held, 8 * r, up=False)  # chunks
        lane = 8 * s.row_tiles * b.product(kept, u) + case.working
        limit(lane <= sizes.THREAD_REGISTERS)
        limit(lane <= share)
        limit(s.inputs * sizes.COLUMNS * units * s.element <= sizes.VECTOR * 32 * warps)
        spilt = b.new(10**4)
        m.add_max_equality(spilt, [0, s.panels * depth - kept])
        rows = s.row_tiles * b.product(u, warps)  # row tiles, over the warps
        weight = b.product(spilt, rows)
        limit(
            2 * sizes.COLUMNS * 4 * sizes.column_floats(s.row_tiles) * b.product(u, warps)
            + s.inputs * sizes.COLUMNS * s.element * b.product(stages, units)
            + (s.states + s.sums) * sizes.COLUMNS * 4 * b.product(tiles, units)
            + tiles * (sizes.COLUMNS * sizes.COLUMN_BYTES + 4 + 4 * sizes.CELL_WARPS)
            + 64
            + 1024 * weight
            <= case.device.shared_bytes
        )
        products = b.product(depth, rows)
        tile = (
            s.panels * MMA // 4 * 2 * products
            + (1024 * SHARED // 128) * weight
            + 2 * sizes.COLUMNS * 16 * 4 * SHARED // 128 * rows
            + s.panels * D * sizes.COLUMNS * s.element * L2 // 64
            + 20 * units
        )
        groups = b.quotient(case.device.sms, blocks, up=False)
        at_once = b.new(BATCH_TILES, 1)  # tiles of the batch, each with a group of its own
        m.add(at_once <= groups).only_enforce_if(fit)
        clocks = b.new(10**7)
        rounds = b.quotient(BATCH_TILES, at_once)
        m.add(clocks >= b.product(rounds, tile)).only_enforce_if(fit)
        # A head that does not fit streams its weight at every step: 2 KB a clock for the chip.
        gates = s.row_tiles * s.panels
        m.add(clocks >= 4 * (2000 + gates * D * D * s.element // 2048)).only_enforce_if(~fit)
        costs.append(clocks)
        if must_fit:
            m.add(fit == 1)
    for variable, most in ((tiles, HIDDEN_TILES), (stages, LATENCY_STAGES)):
        if variable.name not in pins:
            m.add(variable <= most)
    # A tile or a stage less costs an exposed latency, 100 clocks, at every step of every case.
    m.minimize(sum(costs) - 400 * len(cases) * (tiles + stages) + held)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # gives the same solution every time
    if solver.solve(m) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    values = {v.name: solver.value(v) for v in (units, warps, tiles, stages, held)}
    fitting = [bool(solver.value(fit)) for fit in fits]
    cost = sum(solver.value(c) for c in costs) // 4
    return Solution(values, int(solver.objective_value), cost, fitting)
