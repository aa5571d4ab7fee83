"""Draws random valid arguments for fused_rnn's public functions."""

from __future__ import annotations

from typing import Any

import torch

from fuzzing.draw import Draw, maker, with_gradient


def recurrent_cell(draw: Draw, name: str) -> tuple[dict[str, Any], Any]:
    """Draws the arguments that choose a cell of fused_rnn; returns them and the cell's sizes."""
    from flashcell.kernels.fused_rnn import CELLS

    stem = name.removesuffix("_step")
    if stem in ("recurrent", "block"):
        cell = draw.pick(CELLS)
        return {"cell": cell}, CELLS[cell]
    if stem == "rnn":
        nonlinearity = draw.pick(("tanh", "relu"))
        return {"nonlinearity": nonlinearity}, CELLS[f"rnn_{nonlinearity}"]
    return {}, CELLS[stem]


def recurrent_state(draw: Draw, spec: Any, *shape: int) -> tuple[torch.Tensor, ...]:
    state = [draw.normal(*shape, dtype=draw.wide) for _ in range(spec.states)]
    if spec.name == "slstm":
        state[2] = state[2].abs() + 0.5  # n of a state that is not empty
    return tuple(state)


@maker("lstm", "gru", "rnn", "slstm", "recurrent")
def _recurrent(draw: Draw, name: str) -> dict[str, Any]:
    call, spec = recurrent_cell(draw, name)
    B, T, S, masks = draw.rows()
    N, D = draw.pick((1, 1, 2, 3, 0)), draw.pick((1, 2, 3, 5, 8, 16, 17, 33, 0))
    call |= {"x": draw.normal(B, T, spec.gates, N, D), **masks}
    call["weight"] = draw.parameter(spec.gates, N, D, D, scale=max(D, 1) ** -0.5)
    call["bias"] = draw.maybe(draw.parameter(spec.bias_rows, N, D))
    call["state"] = draw.maybe(recurrent_state(draw, spec, S, N, D))
    call["grad_clip"] = draw.maybe(draw.pick((0.0, 0.05, 1)), 0.2)
    call["precision"] = draw.pick(("highest", "tf32"))
    call["save"] = draw.pick(("gates", "recompute"))
    call["backend"] = draw.backend()
    if spec.bounded and call["backend"] != "cuda":
        call["clip_state"] = draw.maybe(draw.pick((0.25, 1, float("inf"))), 0.2)
    return call


@maker("lstm_step", "gru_step", "rnn_step", "slstm_step", "recurrent_step")
def _recurrent_step(draw: Draw, name: str) -> dict[str, Any]:
    call, spec = recurrent_cell(draw, name)
    B, N, D = draw.pick((1, 2, 5, 0)), draw.pick((1, 2)), draw.pick((1, 3, 8, 17, 33))
    call |= {"x": draw.normal(B, spec.gates, N, D)}
    call["weight"] = draw.parameter(spec.gates, N, D, D, scale=D**-0.5)
    call["bias"] = draw.maybe(draw.parameter(spec.bias_rows, N, D))
    call["state"] = draw.maybe(recurrent_state(draw, spec, B, N, D))
    return {**call, "backend": draw.backend()}


@maker("run_layers")
def _run_layers(draw: Draw, name: str) -> dict[str, Any]:
    from flashcell.kernels.fused_rnn import CELLS

    spec = CELLS[draw.pick(("lstm", "gru", "rnn_tanh", "rnn_relu", "slstm"))]
    layers, directions = draw.pick((1, 1, 2, 3)), draw.pick((1, 2))
    B, T, I, D = (
        draw.rng.randint(1, 4),
        draw.pick((1, 2, 5)),
        draw.pick((1, 3, 8)),
        draw.pick((1, 4, 9)),
    )
    has_bias, projects = draw.chance(0.5), spec.name == "lstm" and draw.chance(0.3)
    O = draw.rng.randint(1, D) if projects else D
    weights = []
    for number in range(layers * directions):
        inputs = I if number < directions else directions * O
        shapes = [(spec.gates * D, inputs), (spec.gates * D, O)]
        shapes += [(spec.gates * D,)] * 2 * has_bias + [(O, D)] * projects
        weights += [draw.normal(*shape, scale=D**-0.5) for shape in shapes]
    batch_first = draw.chance(0.5)
    x, batch_sizes = draw.normal(*((B, T, I) if batch_first else (T, B, I))), []
    if not projects and draw.chance(0.3):  # a PackedSequence
        batch_sizes = sorted((draw.rng.randint(1, B) for _ in range(T)), reverse=True)
        B, x = batch_sizes[0], draw.normal(sum(batch_sizes), I)
    widths = [O, *[D] * (spec.states - 1)]
    state = [draw.normal(layers * directions, B, width) for width in widths]
    width = draw.pick((D, D, -(-D // 8) * 8))
    options = (batch_sizes, has_bias, projects, directions, batch_first, width, 0.0, False)
    call = {"cell": spec.name, "x": x, "weights": weights, "options": options}
    return {**call, "state": draw.pick((state, []))}


@maker("run_step")
def _run_step(draw: Draw, name: str) -> dict[str, Any]:
    from flashcell.kernels.fused_rnn import CELLS

    spec = CELLS[draw.pick(("lstm", "gru", "rnn_tanh", "rnn_relu"))]
    B, I, D = draw.rng.randint(1, 9), draw.pick((1, 3, 8)), draw.pick((1, 4, 9))
    shapes = [(spec.gates * D, I), (spec.gates * D, D)]
    shapes += [(spec.gates * D,)] * 2 * draw.chance(0.5)
    weights = [draw.normal(*shape, scale=D**-0.5) for shape in shapes]
    state = [draw.normal(B, D) for _ in range(spec.states)]
    call = {"cell": spec.name, "x": draw.normal(B, I), "weights": weights, "tf32": False}
    call["state"] = draw.pick((state, []))
    return {k: with_gradient(v, lambda: draw.chance(0.5)) for k, v in call.items()}


@maker("linear")
def _linear(draw: Draw, name: str) -> dict[str, Any]:
    I, O = draw.pick((0, 1, 3, 8, 33)), draw.pick((0, 1, 5, 16, 40))
    shape = [draw.pick((0, 1, 2, 5)) for _ in range(draw.pick((0, 1, 2)))]
    bias = draw.maybe(draw.parameter(O))
    x, weight = draw.normal(*shape, I), draw.parameter(O, I)
    return {"x": x, "weight": weight, "bias": bias, "backend": draw.backend()}


@maker("block_step")
def _block_step(draw: Draw, name: str) -> dict[str, Any]:
    call, spec = recurrent_cell(draw, name)
    B, N, D, I = (
        draw.pick((1, 2, 9)),
        draw.pick((1, 2)),
        draw.pick((1, 4, 8, 17, 32)),
        draw.pick((1, 8, 20, 32)),
    )
    H, G = N * D, spec.gates
    scale = {"scale": H**-0.5}
    call |= {"x": draw.normal(B, H), "mixer_norm": draw.normal(H), "mlp_norm": draw.normal(H)}
    call |= {"in_proj": draw.normal(G * H, H, **scale), "weight": draw.normal(G, N, D, D, **scale)}
    call |= {"bias": draw.maybe(draw.normal(spec.bias_rows, N, D))}
    call |= {"state": recurrent_state(draw, spec, B, N, D)}
    call |= {"gate": draw.normal(I, H, **scale), "up": draw.normal(I, H, **scale)}
    call |= {"down": draw.normal(H, I, scale=I**-0.5), "mlp_eps": draw.pick((1e-6, 1e-3))}
    if draw.chance(0.3):
        quantize = draw.four_bits if H % 32 == I % 32 == 0 and draw.chance(0.5) else draw.eight_bits
        kept = {name: quantize(call[name]) for name in ("in_proj", "gate", "up", "down")}
        call |= {name: bits for name, (bits, _) in kept.items()}
        call["scales"] = tuple(scale for _, scale in kept.values())
    return {**call, "backend": draw.backend()}


@maker("explain_plan", "explain_layers")
def _explain(draw: Draw, name: str) -> dict[str, Any]:
    from flashcell.kernels.fused_rnn import CELLS

    call = {
        "cell": draw.pick(CELLS),
        "dtype": draw.pick(("bfloat16", torch.float16)),
        "arch": draw.pick(("H200", "A100")),
        "width": draw.pick((8, 64, 768)),
        "batch": draw.pick((1, 16)),
    }
    return call | {"heads" if name == "explain_plan" else "layers": draw.pick((1, 4))}
