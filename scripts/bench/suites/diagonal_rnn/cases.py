"""CPU benchmark cases of diagonal_rnn: shapes, our provider, the peers, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashcell.kernels import diagonal_rnn as reference

CELLS = reference.CELLS
WEIGHTS = ("a", "p")


@dataclass(frozen=True)
class Case:
    """One line of the table: the op, the peer, and the target ratio."""

    name: str
    cell: str
    batch: int
    steps: int
    width: int
    dtype: str
    # "reference": our loop in torch; "pararnn": pararnn-torch's, where it can be imported
    peers: tuple[str, ...]
    required: float | None = None
    passes: tuple[str, ...] = ("forward", "train")
    heads = 1


SHORT = {"float32": "fp32", "bfloat16": "bf16"}
CASES = [
    Case(f"{cell}-{short}", cell, 8, 512, 1024, dtype, ("reference",), 5.0)
    for cell in CELLS
    for dtype, short in SHORT.items()
]
CASES += [
    Case("flash_gru-long", "flash_gru", 1, 4096, 256, "float32", ("reference",), 5.0),
    Case("flash_gru-step", "flash_gru", 1, 1, 1024, "float32", ("reference",), None, ("step",)),
]
# pararnn-torch's gradient on the CPU takes time with the square of T, hence few steps there
CASES += [
    Case(f"{cell}-{short}-pararnn-{steps}", cell, 8, steps, 1024, dtype, ("pararnn",), 2.0, passes)
    for cell in CELLS
    for dtype, short in SHORT.items()
    for steps, passes in ((512, ("forward",)), (64, ("train",)))
]


def passes(case: Case) -> tuple[str, ...]:
    return case.passes


def has_torch_peer(case: Case) -> bool:
    return False


def parameters(case: Case) -> dict[str, torch.Tensor]:
    """Draws x [B, T, 3, D], a [3, D] and p [2, D] within the published bound 0.5, and dh [B, T,
    D]."""
    spec, generator = CELLS[case.cell], torch.Generator().manual_seed(0)
    B, T, D, dtype = case.batch, case.steps, case.width, getattr(torch, case.dtype)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    weight = (torch.rand(spec.weights, D, generator=generator) - 0.5).to(dtype)
    p = {"x": normal(B, T, spec.gates, D), "dh": normal(B, T, D), "a": weight[:3]}
    return p | ({"p": weight[3:]} if spec.weights > 3 else {})


class Ours:
    """Our provider: the cell without its projection, by the kernel or by the torch reference."""

    def __init__(self, case: Case, p: dict[str, torch.Tensor], kernel):
        self.leaves = [p[k].clone().requires_grad_() for k in ("x", *WEIGHTS) if k in p]
        self.call = getattr(kernel, f"{case.cell}_step" if case.steps == 1 else case.cell)

    def __call__(self) -> torch.Tensor:
        x, *weights = self.leaves
        if x.shape[1] == 1:
            return self.call(x[:, 0], *weights)[0][:, None]
        return self.call(x, *weights)[0]

    def gradients(self, grads) -> list[torch.Tensor]:
        return list(grads)


class ParaRNN(Ours):
    """pararnn-torch's cell (PyPI, imported as `pararnn`) on the CPU, step by step: `sequential_apply`.

    Its projection is left out, so that both providers start from pre-activations. Its Newton solver on the
    CPU takes several times as long.
    """

    def __init__(self, case: Case, p: dict[str, torch.Tensor], kernel):
        try:
            from pararnn import ParaGRU, ParaLSTM
            from pararnn.solvers.sequential import sequential_apply
        except ImportError as error:
            raise SystemExit(f"error: {case.name}: pararnn cannot be imported: {error}") from None
        super().__init__(case, p, reference)
        gru = case.cell == "flash_gru"
        self.cell = (ParaGRU if gru else ParaLSTM)(1, case.width, dtype=p["x"].dtype)
        self.cell.W_x = torch.nn.Identity()
        self.names = ("a_z", "a_r", "a_n") if gru else ("a_f", "a_o", "a_z", "c_f", "c_o")
        self.order = [0, 1, 2] if gru else [0, 2, 1]  # of the peer's gates in x: f, z, o
        x, *weights = self.leaves
        rows = torch.cat(weights).detach()
        with torch.no_grad():
            for k, name in enumerate(self.names):
                getattr(self.cell, name).copy_(rows[k])
        self.apply = sequential_apply
        x = x.detach()[:, :, self.order].requires_grad_()
        self.leaves = [x, *(getattr(self.cell, name) for name in self.names)]

    def __call__(self) -> torch.Tensor:
        h = self.apply(self.cell, self.leaves[0].flatten(2))
        return h if h.dim() == 3 else h[..., -1, :]

    def gradients(self, grads) -> list[torch.Tensor]:
        """Returns the gradients in the order and shapes of Ours."""
        dx, *rows = grads
        dx = dx[:, :, self.order]  # the permutation is its own inverse
        return [dx, *(torch.stack(part) for part in (rows[:3], rows[3:]) if part)]


def peer_of(case: Case, p: dict[str, torch.Tensor], kind: str):
    return ParaRNN(case, p, reference) if kind == "pararnn" else Ours(case, p, reference)


def work(
    case: Case, which: str, product_rate: Callable, bandwidth: Callable
) -> tuple[float, float]:
    """Returns GFLOP and the floor in ms: bytes read and written once, at `bandwidth(size)` GB/s.

    Forward x and h; in training also h, x, dh and dx, and the c that flash_lstm keeps. A sigmoid or a
    tanh counts as 20 operations.
    """
    spec, cells = CELLS[case.cell], case.batch * case.steps * case.width
    item = getattr(torch, case.dtype).itemsize
    moved, operations = spec.gates + 1, 20 * (spec.gates + spec.states - 1) + 12 * spec.states
    if which == "train":
        moved += 2 * spec.gates + 2 + 2 * (spec.states - 1)
        operations = 2 * operations + 20 * spec.states
    size = moved * cells * item
    return 1e-9 * operations * cells, size / bandwidth(size) * 1e-6
