"""Generates the test problems: shapes that break kernels, and every option of the op contract.

FLASHCELL_TEST_DEVICE=cuda runs the tests of the ops there.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

DEVICE = os.environ.get("FLASHCELL_TEST_DEVICE", "cpu")


@dataclass(frozen=True)
class Case:
    """One call. `options` names what is used: state reset hold lengths cu clip nobias strided."""

    B: int
    T: int
    N: int
    D: int
    options: tuple = field(default=())

    def __str__(self) -> str:
        return "-".join([f"B{self.B}T{self.T}N{self.N}D{self.D}", *self.options])


ODD = Case(3, 7, 2, 5, ("state",))
SHAPES = [
    ODD,
    Case(1, 1, 1, 1),
    Case(2, 1, 3, 16, ("state",)),
    Case(1, 9, 1, 33, ("state",)),
    Case(17, 5, 1, 48, ("state",)),
    Case(4, 12, 4, 64),
    Case(2, 3, 1, 300, ("state",)),
    Case(1, 3, 1, 520, ("state",)),
    Case(20, 4, 1, 130, ("state",)),
    Case(70, 3, 1, 5, ("state",)),  # more than two of the CPU's chunks of 32 rows
    Case(70, 3, 1, 5, ("state", "lengths")),
]
OPTIONS = [
    ("nobias",),
    ("state", "reset"),
    ("state", "hold"),
    ("state", "reset", "hold"),
    ("state", "lengths"),
    ("state", "lengths", "reset", "hold"),
    ("state", "cu"),
    ("state", "cu", "reset", "hold"),
    ("state", "clip"),
    ("state", "cut"),
    ("state", "strided"),
]
EMPTY = [
    Case(0, 4, 2, 8),
    Case(2, 0, 2, 8, ("state",)),
    Case(2, 3, 0, 8),
    Case(1, 0, 1, 4, ("cu0",)),
]
CASES = [*SHAPES, *(replace(Case(5, 11, 2, 24), options=o) for o in OPTIONS)]


def generator(case: Case) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(sum(map(ord, str(case))))


def make(cell, case: Case, dtype: torch.dtype, device: str = DEVICE) -> dict:
    """Returns arguments of `recurrent(cell.name, **arguments)`: values drawn in float64, then
    rounded."""
    with torch.device("cpu"):
        return to_device(_draw(cell, case, dtype), device)


def to_device(call: dict, device: str = DEVICE) -> dict:
    place = lambda v: v.to(device) if isinstance(v, torch.Tensor) else v
    return {k: tuple(map(place, v)) if k == "state" else place(v) for k, v in call.items()}


def _draw(cell, case: Case, dtype: torch.dtype) -> dict:
    g = generator(case)
    N, D = case.N, case.D
    has = case.options
    call = {}
    B, T, sequences = draw_rows(call, case, g)
    G = cell.gates
    call["x"] = draw_x(case, g, (B, T, G, N, D), dtype)
    scale = D**-0.5 if D else 1.0
    call["weight"] = (scale * torch.randn(G, N, D, D, generator=g, dtype=torch.float64)).to(dtype)
    if "nobias" not in has:
        bias = torch.randn(cell.bias_rows, N, D, generator=g, dtype=torch.float64)
        call["bias"] = bias.to(dtype)
    if "state" in has:
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        state = torch.randn(cell.states, sequences, N, D, generator=g, dtype=torch.float64)
        if cell.name == "slstm":
            state[2] = state[2].abs() + 0.5  # n > 0, except for one empty unit
            state[1:3, :1, :1, :1] = 0.0
        call["state"] = tuple(state.to(state_dtype))
    draw_masks(call, case, g, B, T)
    if "clip" in has:
        call["grad_clip"] = 0.05
    if "cut" in has:
        call["grad_clip"] = 0.0
    return call


def draw_rows(call: dict, case: Case, g: torch.Generator) -> tuple[int, int, int]:
    """Returns B, T of x and the number of sequences; with "cu" all of them are in one row."""
    if "cu0" in case.options:
        call["cu_seqlens"] = torch.zeros(1, dtype=torch.int64)
        return case.B, case.T, 0
    if "cu" not in case.options:
        return case.B, case.T, case.B
    T = case.B * case.T
    cuts = torch.sort(torch.randint(0, T + 1, (case.B - 1,), generator=g)).values
    cuts[0] = 0  # an empty first document
    call["cu_seqlens"] = torch.tensor([0, *cuts.tolist(), T], dtype=torch.int32)
    return 1, T, case.B


def draw_x(case: Case, g: torch.Generator, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    # A slice of a wider projection, with batch and time swapped in memory.
    if "strided" in case.options:
        B, T, *middle, D = shape
        wide = torch.randn(T, B, *middle, D + 3, generator=g, dtype=torch.float64).to(dtype)
        x = wide.transpose(0, 1)[..., :D]
    return x.to(dtype)


def draw_masks(call: dict, case: Case, g: torch.Generator, B: int, T: int) -> None:
    for name in ("reset", "hold"):
        if name in case.options:
            call[name] = torch.rand(B, T, generator=g) < 0.25
    if "lengths" in case.options:
        call["lengths"] = torch.randint(0, T + 1, (B,), generator=g)


def upcast(call: dict) -> dict:
    """Returns the same call in float64."""
    widen = lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
    return {k: tuple(map(widen, v)) if k == "state" else widen(v) for k, v in call.items()}


def with_gradients(
    h, last, sources: dict, dh, dlast, states=(), dstates=()
) -> dict[str, torch.Tensor]:
    """Returns h, the last states, those of every step and the gradients of `sources` by name, given
    the gradients of the former; None for one that has none."""
    outputs = [(h, dh), *zip(last, dlast, strict=True), *zip(states, dstates, strict=True)]
    # With T = 0, h is constant.
    outputs = [(y, dy.to(y.dtype)) for y, dy in outputs if dy is not None and y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in outputs],
        list(sources.values()),
        [dy for _, dy in outputs],
        materialize_grads=True,
    )
    named = {"h": h, **{f"last[{k}]": s for k, s in enumerate(last)}}
    named |= {f"states[{k}]": s for k, s in enumerate(states, 1)}
    named.update({f"d{k}": g for k, g in zip(sources, grads, strict=True)})
    return {k: v.detach() for k, v in named.items()}


def eager_and_compiled(
    model: Callable[..., torch.Tensor], *inputs: torch.Tensor, backend: str = "aot_eager"
) -> list[list[torch.Tensor]]:
    """Returns output and gradients of `inputs`, of `model` and of it compiled in one graph."""
    torch._dynamo.reset()
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    return results


def replayed(
    once: Callable[[], Any], renew: Callable[[], Any], times: int = 3
) -> Iterator[tuple[Any, Any]]:
    """Yields `times` pairs: the results of once() replayed as a CUDA graph, and those of a direct
    call. Before each pair, renew() changes the input in place."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once()  # work of a first call is not part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = once()
    for _ in range(times):
        with torch.no_grad():
            renew()
        graph.replay()
        torch.cuda.synchronize()
        yield captured, once()
