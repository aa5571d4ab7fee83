"""GPU benchmark cases of fused_rnn, with their limits and inputs, for bench_ops --device cuda."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from bench.suites.fused_rnn.case import Case
from bench.suites.fused_rnn.floor_cuda import Recurrence, floor_seconds
from flashcell.kernels import fused_rnn as reference

CELLS = reference.CELLS


def passes(case: Case) -> tuple[str, ...]:
    """Returns the passes to time: "forward" saves for the backward, "train" includes all
    gradients."""
    return ("step",) if case.is_step else ("inference", "forward", "train")


def parameters(case: Case, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draws the inputs on the device: x and dh, and except for modules w_ih, w_hh, bias, state.

    x [B, T, I], or [B, T, G, N, D] projected; w_ih [G, N, D, I]; w_hh [G, N, D, D]; bias
    [R, N, D]; state [K, B, N, D]; dh [B, T, directions * I].
    """
    spec, inputs = CELLS[case.cell], case.inputs
    B, T, N, D, G = case.batch, case.steps, case.heads, case.width, spec.gates
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(case.torch_dtype)

    x = (G, N, D) if case.form in ("op", "step") else (inputs,)
    p = {"x": normal(B, T, *x), "dh": normal(B, T, case.directions * inputs)}
    if case.form == "module":
        return p
    p["w_hh"] = normal(G, N, D, D, scale=0.5 * D**-0.5)
    p["bias"] = normal(spec.bias_rows, N, D, scale=0.1)
    if case.form in ("linear", "linear-step"):
        p["w_ih"] = normal(G, N, D, inputs, scale=inputs**-0.5)
    if case.is_step:
        p["state"] = normal(spec.states, B, N, D, scale=0.5).float()  # fp32, as a step returns it
        if case.cell == "slstm":
            p["state"][2] = p["state"][2].abs() + 0.5  # n is positive
    return p


def lengths(case: Case) -> torch.Tensor:
    """Returns the lengths of a packed batch, evenly from T down to T/2."""
    return torch.linspace(case.steps, max(1, case.steps // 2), case.batch).long()


def work(case: Case, which: str) -> tuple[float, float, float]:
    """Returns FLOP, least bytes and the floor in seconds of one pass over a case.

    Bytes: every input is read once, every output written once; a forward that keeps values for the
    backward writes the gates, and the backward reads them.
    """
    spec, D, I = CELLS[case.cell], case.width, case.inputs
    G, N, size = spec.gates, case.heads, torch.empty((), dtype=case.torch_dtype).itemsize
    rows = case.batch * case.steps
    if case.packed:
        rows = int(lengths(case).sum())
    projected = case.form in ("op", "step")
    recur = 2.0 * rows * G * N * D * D * case.layers * case.directions
    project = 0.0
    if not projected:
        deeper = (case.layers - 1) * case.directions * I
        project = 2.0 * rows * G * I * case.directions * (I + deeper)
    if which == "step":
        weight = size * G * N * D * (D + (0 if projected else I))
        moved = weight + size * rows * (G * I if projected else I)
        return recur + project, moved, floor_seconds(_recurrence(case), 0, moved, 0.0)
    gates, h = (size * rows * k * I * case.layers * case.directions for k in (G, 1))
    moved = gates + h + (0 if which == "inference" else gates)
    if which != "train":
        return recur + project, moved, floor_seconds(_recurrence(case), 1, moved, project)
    moved += gates + gates + 2 * h  # read what was kept, write dx, read dh and h
    flops, beside = 3 * (recur + project), 3 * project + recur
    return flops, moved, floor_seconds(_recurrence(case), 2, moved, beside)


def _recurrence(case: Case) -> Recurrence:
    heads = case.heads * case.layers * case.directions
    steps = case.steps + case.layers - 1  # a wavefront: layers run at once, a step apart
    return Recurrence(CELLS[case.cell].gates, heads, case.width, case.batch, steps, case.dtype)


def _case(
    cell: str, shape: str, form: str, *limits: float | None, tag: str = "", **options
) -> Case:
    """Makes a case from a shape such as "12x64 b16 t1024"; these b and t are the defaults."""
    size, *rest = shape.split()
    usual = {"b": 16, "t": 1 if form.endswith("step") else 1024}
    numbers = usual | {word[0]: int(word[1:]) for word in rest}
    heads, width = map(int, size.split("x"))
    words = [cell.replace("_", "-"), size]
    words += [f"{k}{n}" for k, n in numbers.items() if n != usual[k]]
    words += [word for word in (form, tag) if word not in ("op", "")]
    sizes = numbers["b"], numbers["t"], heads, width
    wanted = (*limits, None, None)[:2]
    return Case("-".join(words), cell, *sizes, form, limits=wanted, **options)


CUDNN = ("cudnn-fp16", "cudnn-bf16")
BOTH = (*CUDNN, "flashrnn")

MUST = [
    _case("lstm", "12x64", "op", 0.35, 0.9, peers=("flashrnn",)),
    _case("lstm", "12x64 b32", "op", 0.40, 1.0, peers=("flashrnn",)),
    _case("lstm", "24x32", "op", 0.25, 0.8, peers=("flashrnn",)),
    _case("lstm", "6x128", "op", 0.70, 2.0, peers=("flashrnn",)),
    _case("lstm", "3x256", "op", 1.1, 3.0, peers=("flashrnn",)),
    _case("lstm", "1x768", "linear", 1.9, 5.0, peers=BOTH),
    _case("lstm", "1x768 b64", "linear", 2.4, 7.0, peers=CUDNN),
    _case("lstm", "1x768 b128", "linear", 3.4, 10.0, peers=CUDNN),
    _case("lstm", "1x768 b1", "linear", 1.5, 4.0, peers=CUDNN),
    _case("lstm", "1x768 b2", "linear", 1.5, 4.0, peers=CUDNN),
    _case("lstm", "1x1024", "linear", 2.2, 6.5, peers=CUDNN),
    _case("lstm", "1x2048", "linear", 4.5, 13.0, peers=CUDNN),
    _case("gru", "1x768", "linear", 2.0, 5.5, peers=CUDNN),
    _case("rnn_tanh", "1x768", "linear", 1.7, 4.5, peers=CUDNN),
    _case("slstm", "12x64", "op", 0.45, 1.4, peers=("flashrnn",)),
    _case("slstm", "1x768", "op", 2.0, 5.5, peers=("flashrnn",)),
    _case("lstm", "1x768", "module", 6.0, 18.0, peers=CUDNN, layers=4, tag="layers4"),
    _case("lstm", "1x768", "module", 2.7, 8.0, peers=CUDNN, directions=2, tag="bidirectional"),
    _case("lstm", "1x768", "module", 2.2, 6.0, peers=CUDNN, packed=True, tag="packed"),
    _case("lstm", "1x768", "linear", 4.0, 10.0, peers=("cudnn-tf32",), dtype="tf32", tag="tf32"),
    _case("lstm", "1x768 b1", "step", 6e-3),
    _case("lstm", "1x768 b64", "step", 10e-3),
    _case("lstm", "1x768 b1", "linear-step", peers=CUDNN),
    _case("lstm", "1x768 b64", "linear-step", peers=CUDNN),
]
# Beyond the table: what else the op takes.
MORE = [
    _case("lstm", "12x64", "op", save="recompute", tag="recompute"),
    _case("lstm", "1x768", "op", save="recompute", tag="recompute"),
    _case("lstm", "12x64", "op", dtype="float16", tag="fp16"),
    _case("lstm", "1x768", "linear", dtype="float16", peers=("cudnn-fp16",), tag="fp16"),
    _case("lstm", "1x768", "linear", dtype="float32", peers=("cudnn-fp32",), tag="fp32"),
    _case("gru", "12x64", "op"),
    _case("lstm", "1x64 b192", "linear", peers=CUDNN),
]


def _sweeps() -> list[Case]:
    """Returns the sweeps of FlashRNN's figures: heads, batch, length, with and without the
    projection."""
    cases: dict[str, Case] = {}

    def add(cell: str, shape: str, form: str = "op", peers=("flashrnn",)) -> None:
        case = _case(cell, shape, form, peers=peers)
        cases.setdefault(case.name, case)

    for cell in ("lstm", "slstm"):
        for width in (16, 32, 64, 128, 256, 768):
            add(cell, f"{768 // width}x{width}")
        for size in ("12x64", "1x768"):
            yardstick = ("sdpa",) if cell == "lstm" and size == "12x64" else ()
            linear = CUDNN if cell == "lstm" and size == "1x768" else ()
            shapes = [f"b{b}" for b in (2, 4, 8, 16, 32, 64, 128, 256)]
            shapes += [f"t{t}" for t in (256, 512, 2048)]
            for shape in shapes:
                add(cell, f"{size} {shape}", "op", ("flashrnn", *yardstick))
                if cell == "lstm":
                    add(cell, f"{size} {shape}", "linear", (*linear, "flashrnn"))
            # a minute for each pass to compile, so one case of it
            compiled = ("compile",) if cell == "lstm" and size == "12x64" else ()
            add(cell, f"{size} t64", "op", ("flashrnn", "loop", *compiled))
    return list(cases.values())


SUITES = {"must": MUST, "flashrnn": _sweeps(), "more": MORE}


def select(suites: Sequence[str], patterns: Sequence[str]) -> list[Case]:
    """Returns the cases of `suites` whose names match one of `patterns`.

    A name in two suites runs once, beside the peers of both, and keeps its limits in any suite.
    """
    limited = {case.name: case for case in MUST}
    chosen: dict[str, Case] = {}
    for case in (case for suite in suites for case in SUITES[suite]):
        if any(fnmatchcase(case.name, pattern) for pattern in patterns):
            earlier = chosen[case.name].peers if case.name in chosen else ()
            peers = tuple(dict.fromkeys(earlier + case.peers))
            chosen[case.name] = replace(limited.get(case.name, case), peers=peers)
    return list(chosen.values())
