"""Draws random valid arguments for diagonal_rnn's public functions."""

from __future__ import annotations

from typing import Any

import torch

from fuzzing.draw import Draw, maker


def diagonal_weights(draw: Draw, name: str, D: int) -> dict[str, Any]:
    rows = {"a": draw.parameter(3, D, scale=0.7)}
    if "lstm" in name:
        rows["p"] = draw.parameter(2, D, scale=0.7)
    return {**rows, "bias": draw.maybe(draw.parameter(3, D, scale=0.7), 0.3)}


def diagonal_state(draw: Draw, name: str, *shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(draw.normal(*shape, dtype=draw.wide) for _ in range(2 if "lstm" in name else 1))


@maker("flash_gru", "flash_lstm")
def _diagonal(draw: Draw, name: str) -> dict[str, Any]:
    B, T, S, masks = draw.rows()
    N, J = draw.pick((0, 0, 1, 2, 3)), draw.pick((1, 2, 5, 8, 16, 17, 33, 0))
    D = max(N, 1) * J
    x = draw.normal(*(N,) * (N > 0), B, T, 3, J)
    call = {"x": x, **diagonal_weights(draw, name, D), **masks}
    call["state"] = draw.maybe(diagonal_state(draw, name, S, D))
    call["method"] = draw.pick(("auto", "sequential"))
    call["return_info"] = draw.chance(0.2)
    return {**call, "backend": draw.backend()}


@maker("flash_gru_step", "flash_lstm_step")
def _diagonal_step(draw: Draw, name: str) -> dict[str, Any]:
    B, N, J = draw.pick((1, 2, 5, 0)), draw.pick((0, 0, 1, 2)), draw.pick((1, 2, 8, 17, 0))
    D = max(N, 1) * J
    call = {"x": draw.normal(*(N,) * (N > 0), B, 3, J), **diagonal_weights(draw, name, D)}
    state = draw.maybe(diagonal_state(draw, name, B, D))
    return {**call, "state": state, "backend": draw.backend()}


@maker("linear_scan", "block_scan")
def _scan(draw: Draw, name: str) -> dict[str, Any]:
    B, T, D = draw.pick((1, 2, 3, 0)), draw.pick((0, 1, 2, 5, 9)), draw.pick((1, 2, 5, 16, 17, 0))
    n = (draw.rng.randint(1, 4),) if name == "block_scan" else ()
    a = draw.parameter(B, T, D, *n, *n, scale=0.5)
    h0 = draw.maybe(draw.parameter(B, D, *n))
    call = {"a": a, "b": draw.normal(B, T, D, *n), "h0": h0, "reverse": draw.chance(0.5)}
    return {**call, "backend": draw.backend()}


@maker("causal_conv")
def _causal_conv(draw: Draw, name: str) -> dict[str, Any]:
    B, T, D, K = (
        draw.pick((1, 2, 0)),
        draw.pick((0, 1, 2, 5)),
        draw.pick((1, 5, 8)),
        draw.pick((1, 3, 4)),
    )
    call = {"x": draw.normal(B, T, D), "weight": draw.parameter(D, K)}
    call |= {"bias": draw.maybe(draw.parameter(D)), "window": draw.maybe(draw.normal(B, K - 1, D))}
    return {**call, "reset": draw.maybe(draw.mask(B, T), 0.3), "silu": draw.chance(0.5)}


@maker("conv_step")
def _conv_step(draw: Draw, name: str) -> dict[str, Any]:
    B, D, K = (
        draw.pick((1, 2, 5, 0)),
        draw.pick((2, 8, 16, 34, 5, 1, 0)),
        draw.pick((4, 4, 4, 3, 1)),
    )
    call = {"x": draw.normal(B, D), "weight": draw.normal(D, K), "bias": draw.maybe(draw.normal(D))}
    return {**call, "window": draw.normal(B, K - 1, D), "backend": "auto"}


@maker("mixer_step")
def _mixer_step(draw: Draw, name: str) -> dict[str, Any]:
    cell = draw.pick(("flash_gru", "flash_lstm"))
    B, N, J = draw.pick((1, 2, 5, 0)), draw.pick((1, 2, 3)), draw.pick((2, 4, 8, 18, 1, 5))
    D = N * J
    call = {"cell": cell, "x": draw.normal(B, D), "weight": draw.normal(N, 3, J, J, scale=J**-0.5)}
    rows = [draw.normal(3, D), draw.normal(2, D)][: 1 + (cell == "flash_lstm")]
    call |= {"bias": draw.maybe(draw.normal(3, D)), "rows": tuple(rows)}
    call |= {"state": diagonal_state(draw, cell, B, D), "skip": draw.normal(D)}
    bound = draw.maybe(draw.pick((0.5, 1.0)), 0.3)
    return {**call, "gate": draw.normal(B, D), "bound": bound, "backend": "auto"}


@maker("headwise_linear", "headwise_product")
def _headwise(draw: Draw, name: str) -> dict[str, Any]:
    N, G, J, I = draw.pick((1, 2, 3)), draw.pick((1, 3)), draw.pick((1, 5, 8)), draw.pick((1, 4, 7))
    shape = [draw.pick((0, 1, 2, 5)) for _ in range(draw.pick((0, 1, 2)))]
    call = {"x": draw.normal(*shape, N * I), "weight": draw.normal(N, G, J, I)}
    return call | ({"bias": draw.maybe(draw.normal(G, N * J))} if name == "headwise_linear" else {})


def diagonal_cell(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, gain=0.5) -> torch.Tensor:
    return torch.tanh(gain * w * h + x)


def dense_cell(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, gain=0.5) -> torch.Tensor:
    return torch.tanh(gain * (w * h).flip(-1) + x)


def is_of_cell(error: BaseException) -> bool:
    """Whether the error came from the cell given to solve, which is the caller's code."""
    trace = error.__traceback__
    while trace is not None:
        code, last = trace.tb_frame.f_code, trace.tb_next is None
        calls = code.co_name in ("step", "linearize") and code.co_filename.endswith("problem.py")
        own = code in (diagonal_cell.__code__, dense_cell.__code__)
        if own or (last and calls and "cell(...)" not in str(error)):
            return True
        trace = trace.tb_next
    return False


@maker("solve")
def _solve(draw: Draw, name: str) -> dict[str, Any]:
    B, T, D = draw.pick((1, 2, 3, 0)), draw.pick((0, 1, 2, 5, 9)), draw.pick((1, 2, 3, 6))
    call: dict[str, Any] = {
        "cell": draw.pick((diagonal_cell, dense_cell)),
        "x": draw.normal(B, T, D),
    }
    call |= {
        "params": (draw.normal(D), 0.5)[: draw.pick((1, 2))],
        "mode": draw.pick(("auto", "auto", "torch", "sequential")),
    }
    given = draw.pick(("h0", "state_shape"))
    call[given] = draw.normal(B, D, dtype=draw.wide) if given == "h0" else (D,)
    call["chunk"] = draw.pick((1, 1, 2))
    call["guess"] = draw.maybe(draw.normal(B, T, D), 0.2)
    call["bounds"] = draw.maybe((-2.0, 2.0), 0.2)
    return call
