"""Draws random valid arguments for tfla's public functions."""

from __future__ import annotations

from typing import Any

import torch

from fuzzing.draw import Draw, maker


def gate(draw: Draw) -> tuple[dict[str, Any], int]:
    """Draws the arguments that choose tfla's cell; returns them and the number of states."""
    choices: list[tuple[dict[str, Any], int]] = [
        ({"input_gate": "exp"}, 3),
        ({"input_gate": "sigmoid"}, 1),
    ]
    return draw.pick([*choices, ({"input_gate": "sigmoid", "normalize": "floor"}, 2)])


def mlstm_state(draw: Draw, count: int, S: int, H: int, K: int, V: int) -> tuple[torch.Tensor, ...]:
    shapes = [(S, H, K, V), (S, H, K), (S, H)][:count]
    return tuple(draw.normal(*shape, dtype=draw.wide) for shape in shapes)


def mlstm_inputs(draw: Draw, rows: tuple[int, ...]) -> tuple[dict[str, Any], int, int, int]:
    H, K, V = draw.pick((1, 2, 3, 0)), draw.pick((8, 16, 24)), draw.pick((8, 16, 40))
    call = {"q": draw.normal(*rows, H, K), "k": draw.parameter(*rows, H, K)}
    call["v"] = draw.parameter(*rows, H, V)
    call["i"], call["f"] = (draw.parameter(*rows, H) for _ in range(2))
    return call, H, K, V


def epilogue(draw: Draw, rows: tuple[int, ...], H: int, V: int) -> dict[str, Any]:
    norm = draw.pick((None, "layer", "rms"))
    call = {"norm": norm, "out_gate": draw.maybe(draw.parameter(*rows, H, V), 0.3)}
    return call | ({"norm_weight": draw.maybe(draw.parameter(H, V))} if norm else {})


@maker("mlstm")
def _mlstm(draw: Draw, name: str) -> dict[str, Any]:
    choice, count = gate(draw)
    B, T, S, masks = draw.rows(most=37)
    call, H, K, V = mlstm_inputs(draw, (B, T))
    call |= {**choice, **masks, **epilogue(draw, (B, T), H, V)}
    call["state"] = draw.maybe(mlstm_state(draw, count, S, H, K, V))
    call["chunk_size"] = draw.maybe(draw.pick((1, 3, 16)), 0.7)
    call["eps"] = draw.pick((0.0, 1e-3, 1))
    call["normalizer_grad"] = draw.chance(0.8)
    return {**call, "backend": draw.backend()}


@maker("mlstm_step")
def _mlstm_step(draw: Draw, name: str) -> dict[str, Any]:
    choice, count = gate(draw)
    rows = (draw.pick((1, 2, 5, 0)),)
    call, H, K, V = mlstm_inputs(draw, rows)
    call |= {**choice, **epilogue(draw, rows, H, V)}
    call["inplace"] = draw.chance(0.3)
    call["state"] = mlstm_state(draw, count, *rows, H, K, V)
    if not call["inplace"]:
        call["state"] = draw.maybe(call["state"])
    return {**call, "backend": draw.backend()}


def ring(draw: Draw, *sizes: int) -> Any:
    from flashcell.kernels.tfla import Ring

    B, H, K, V = sizes
    R = draw.pick((1, 2, 5))
    used = [[draw.rng.randint(0, R)] * H for _ in range(B)]
    gates = (draw.normal(B, H, R, dtype=draw.wide) for _ in range(2))
    counts = torch.tensor(used, dtype=torch.int32).reshape(B, H)
    return Ring(draw.normal(B, H, R, K), draw.normal(B, H, R, V), *gates, counts)


@maker("mlstm_replay_step")
def _mlstm_replay_step(draw: Draw, name: str) -> dict[str, Any]:
    choice, count = gate(draw)
    rows = (draw.pick((1, 2, 5, 0)),)
    call, H, K, V = mlstm_inputs(draw, rows)
    call |= {**choice, **epilogue(draw, rows, H, V), "eps": draw.pick((0.0, 1e-3))}
    call["state"] = mlstm_state(draw, count, *rows, H, K, V)
    return {**call, "ring": ring(draw, *rows, H, K, V)}


@maker("mlstm_fold")
def _mlstm_fold(draw: Draw, name: str) -> dict[str, Any]:
    choice, count = gate(draw)
    sizes = draw.pick((1, 2, 0)), draw.pick((1, 2, 0)), draw.pick((8, 24)), draw.pick((8, 40))
    return {**choice, "state": mlstm_state(draw, count, *sizes), "ring": ring(draw, *sizes)}


@maker("mlstm_ring")
def _mlstm_ring(draw: Draw, name: str) -> dict[str, Any]:
    sizes = draw.pick((1, 2, 0)), draw.pick((1, 2, 0)), draw.pick((8, 24)), draw.pick((8, 40))
    return {"C": draw.normal(*sizes), "dtype": draw.io, "steps": draw.pick((1, 3, 16))}


@maker("mlstm_transfer")
def _mlstm_transfer(draw: Draw, name: str) -> dict[str, Any]:
    choice, _ = gate(draw)
    B, T, _, masks = draw.rows(most=20)
    call, *_ = mlstm_inputs(draw, (B, T))
    call.pop("q")
    return {**call, **choice, **masks, "chunk_size": draw.maybe(4), "backend": draw.backend()}


def transfer(draw: Draw, count: int, *sizes: int) -> Any:
    from flashcell.kernels.tfla import Transfer

    C, *others = mlstm_state(draw, count, *sizes)
    n = others[0] if count > 1 else None
    m = others[1] if count > 2 else None
    log_decay = -draw.normal(*sizes[:2], dtype=draw.wide).abs()
    return Transfer(C, n, m, log_decay)


@maker("mlstm_carry")
def _mlstm_carry(draw: Draw, name: str) -> dict[str, Any]:
    count, sizes = draw.rng.randint(1, 3), (draw.pick((0, 1, 2)), 2, 8, 8)
    return {"state": mlstm_state(draw, count, *sizes), "transfer": transfer(draw, count, *sizes)}


@maker("mlstm_compose")
def _mlstm_compose(draw: Draw, name: str) -> dict[str, Any]:
    count, sizes = draw.rng.randint(1, 3), (draw.pick((0, 1, 2)), 2, 8, 8)
    return {"first": transfer(draw, count, *sizes), "second": transfer(draw, count, *sizes)}


@maker("linear_step")
def _linear_step(draw: Draw, name: str) -> dict[str, Any]:
    B, K = draw.pick((1, 2, 5, 0)), draw.pick((8, 16, 40, 64))
    count = draw.pick((1, 1, 2, 3))
    rows = [draw.pick((1, 4, 9, 0)) for _ in range(count)]
    call: dict[str, Any] = {"x": draw.normal(B, K), "norm_weight": draw.maybe(draw.normal(K))}
    kind = draw.pick(
        ("plain", "residual" if count == 1 else "plain", "gated" if count == 2 else "plain")
    )
    if kind == "gated":
        rows[1] = rows[0]
    call["weights"] = [draw.normal(n, K) for n in rows]
    if kind == "plain":
        first = draw.rng.randint(0, count)
        call["biases"] = tuple(draw.normal(n) for n in rows[first:])
        call |= {"capped": draw.rng.randint(0, count), "cap": draw.pick((0.0, 15.0, 2))}
    call["residual"] = draw.normal(B, rows[0]) if kind == "residual" else None
    if draw.chance(0.3):
        first = count if kind == "gated" else draw.rng.randint(1, count)
        quantize = draw.four_bits if K % 32 == 0 and draw.chance(0.5) else draw.eight_bits
        kept = [quantize(w) for w in call["weights"][:first]]
        call["weights"] = [bits for bits, _ in kept] + call["weights"][first:]
        call["scales"] = [scale for _, scale in kept]
    return {**call, "gated": kind == "gated", "backend": draw.backend()}


@maker("norm_step")
def _norm_step(draw: Draw, name: str) -> dict[str, Any]:
    B, K = draw.pick((1, 2, 5, 0)), draw.pick((8, 16, 40))
    rows = [draw.pick((1, 4, 9)) for _ in range(draw.pick((0, 1, 2)))]
    call = {"x": draw.normal(B, K), "norm_weight": draw.normal(K), "cap": draw.pick((0.0, 15.0))}
    call |= {"weights": [draw.normal(n, K) for n in rows], "biases": [draw.normal(n) for n in rows]}
    return call


@maker("gate_step")
def _gate_step(draw: Draw, name: str) -> dict[str, Any]:
    shape = draw.pick((1, 2, 0)), draw.pick((8, 24, 0))
    return {"gate": draw.normal(*shape), "up": draw.normal(*shape)}
