"""The block engine's limits as an integer constraint problem (its table stands in tiles.model)."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from flashcell.kernels.fused_rnn.cells import CELLS, Cell
from flashcell.kernels.fused_rnn.devices import DEVICES, Device
from tiles import sizes
from tiles.model import Builder
from tiles.ptxas import Measured

WIDTHS = (32, 64, 128, 256)
# Registers of a lane besides weights before ptxas has said: states, gates, addresses.
WORKING = {"forward": 48, "backward": 88}
# Stages of the ring, one of which is being read: memory takes 1 us, and a step 0.15 us.
STAGES = range(2, 9)
RING_BYTES = 61440  # beyond it the ring has few_stages


@dataclass(frozen=True)
class Case:
    """One pass of a cell at a compiled width, on a device."""

    cell: Cell
    element: int
    direction: str
    width: int
    device: Device
    working: int | None = None  # registers besides weights, measured

    def threads(self) -> int:
        return self.width * (4 if self.direction == "forward" else 2)

    def held(self) -> int:
        """The 32-bit words of weight per lane: four for each matrix instruction of a step."""
        steps = self.width * self.element // 32
        forward = self.direction == "forward"
        return 4 * steps * (-(-self.cell.gates // 2) if forward else self.cell.gates)

    def registers(self) -> int:
        working = WORKING[self.direction] if self.working is None else self.working
        return self.held() + working

    def row_bytes(self) -> int:
        """The bytes of one row for eight columns, padded by one vector."""
        return (self.width + sizes.VECTOR // self.element) * self.element * sizes.COLUMNS

    def rows(self) -> tuple[int, int]:
        """The rows per step read into the ring, and written through the outbox."""
        c = self.cell
        if self.direction == "forward":
            return c.gates, c.saved + 2
        return c.saved + 1, c.gates * (2 if c.bias_rows > c.gates else 1)

    def operand_bytes(self) -> int:
        width = self.width * (1 if self.direction == "forward" else self.cell.gates)
        return 2 * (width + sizes.VECTOR // self.element) * self.element * sizes.COLUMNS


@dataclass
class Solution:
    values: dict[str, int]
    fits: list[bool]


def solve(cases: list[Case], pins: dict[str, int], must_fit: bool = False) -> Solution | None:
    """Solves for the ring's stages for all cases at once: first as many cases as fit, then
    stages."""
    b = Builder()
    m = b.model
    names = ("stages", "few_stages", "least_stages")
    stages, few, least = (b.choice(n, STAGES, pins.get(n)) for n in names)
    fits, depths = [], []
    for case in cases:
        fit = m.new_bool_var(f"fits{len(fits)}")
        fits.append(fit)
        inputs, outputs = case.rows()
        stage, row = inputs * case.row_bytes(), case.row_bytes()
        many, some = m.new_bool_var(""), m.new_bool_var("")
        ring = pins.get("ring_bytes", RING_BYTES)
        for holds, count in ((many, stages), (some, few)):
            m.add(stage * count <= ring).only_enforce_if(holds)
            m.add(stage * count > ring).only_enforce_if(~holds)
        used = b.new(max(STAGES))
        m.add(used == stages).only_enforce_if(many)
        m.add(used == few).only_enforce_if([~many, some])
        m.add(used == least).only_enforce_if([~many, ~some])
        depths.append(used)
        memory = case.operand_bytes() + stage * used + 2 * outputs * row
        m.add(memory <= case.device.shared_bytes).only_enforce_if(fit)
        lanes = min(sizes.THREAD_REGISTERS, sizes.BLOCK_REGISTERS // case.threads() // 8 * 8)
        if case.threads() > sizes.BLOCK_THREADS or case.registers() > lanes:
            m.add(fit == 0)
        if must_fit:
            m.add(fit == 1)
    # Every case that fits, then stages of every ring; what is left over is as small as can be.
    m.maximize(10**4 * sum(fits) + 10 * sum(depths) - stages - few - least)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(m) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    values = {v.name: solver.value(v) for v in (stages, few, least)}
    return Solution(values, [bool(solver.value(fit)) for fit in fits])


def cases_of(
    name: str, element: int, width: int, device: Device, working: dict[str, int]
) -> list[Case]:
    """Returns the cases of both passes at a compiled width; `working` is measured, by kernel
    name."""
    found = []
    for direction in ("forward", "backward"):
        kernel = f"block-{direction}-{name}-{8 * element}-{width}"
        found.append(Case(CELLS[name], element, direction, width, device, working.get(kernel)))
    return found


def measured_working(arch: int, measured: Measured) -> dict[str, int]:
    """Returns kernel -> registers besides the weight; a spilt word counts as one."""
    found = {}
    for (of_arch, kernel), (registers, spilt, _) in measured.items():
        engine, direction, name, bits, *width = kernel.split("-")
        if of_arch == arch and engine == "block":
            size = (int(bits) // 8, direction, int(width[0]))
            case = Case(CELLS[name], *size, DEVICES[0])
            found[kernel] = registers + -(-spilt // 4) - case.held()
    return found
