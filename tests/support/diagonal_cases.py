"""Problems for diagonal-rnn, from the generator of cases.py: a case's heads are 1, its D channels."""

from dataclasses import replace

import torch

from cases import OPTIONS, Case, draw_masks, draw_rows, draw_x, generator, to_device

SHAPES = [
    Case(3, 7, 1, 5, ("state",)),
    Case(1, 1, 1, 1),
    Case(2, 1, 1, 16, ("state",)),
    Case(1, 9, 1, 33, ("state",)),
    Case(17, 5, 1, 48, ("state",)),
    Case(4, 12, 1, 64),
    Case(2, 19, 1, 131, ("state",)),
    Case(1, 3, 1, 520, ("state",)),
    Case(70, 3, 1, 5, ("state",)),  # more blocks of channels than 64: of many rows,
    Case(1, 2, 1, 65 * 1024 + 8),  # and of one
]
EMPTY = [
    Case(0, 4, 1, 8),
    Case(2, 0, 1, 8, ("state",)),
    Case(2, 3, 1, 0),
    Case(1, 0, 1, 4, ("cu0",)),
]
# this kernel has no gradient clip and no bias
MASKED = [o for o in OPTIONS if not {"nobias", "clip", "cut"} & set(o)]
BIASED = [("bias",), ("bias", "state", "reset", "hold"), ("bias", "state", "lengths")]
CASES = [*SHAPES, *(replace(Case(5, 11, 1, 40), options=o) for o in [*MASKED, *BIASED])]
WEIGHTS = ("a", "p")


def make(cell, case: Case, dtype: torch.dtype) -> dict:
    """Returns arguments of the function named `cell.name`: values drawn in float64, then rounded."""
    g, call = generator(case), {}
    with torch.device("cpu"):
        B, T, sequences = draw_rows(call, case, g)
        call["x"] = draw_x(case, g, (B, T, cell.gates, case.D), dtype)
        weight = torch.randn(cell.weights, case.D, generator=g, dtype=torch.float64)
        parts = (0.7 * weight).to(dtype).split([3, cell.weights - 3])
        call |= {name: part for name, part in zip(WEIGHTS, parts, strict=True) if len(part)}
        if "bias" in case.options:
            bias = torch.randn(cell.gates, case.D, generator=g, dtype=torch.float64)
            call["bias"] = (0.7 * bias).to(dtype)
        if "state" in case.options:
            state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            state = torch.randn(cell.states, sequences, case.D, generator=g, dtype=torch.float64)
            call["state"] = tuple((0.7 * state).to(state_dtype))
        draw_masks(call, case, g, B, T)
    return to_device(call)


def in_heads(x: torch.Tensor, heads: int, dense: bool = True) -> torch.Tensor:
    """Returns x [B, T, G, D] as [N, B, T, G, D / N]."""
    x = x.unflatten(-1, (heads, -1)).movedim(-2, 0)
    return x.contiguous() if dense else x


def leaves(call: dict) -> dict:
    """Returns the call with fresh differentiable tensors, and these by name."""
    leaf = lambda t: t.detach().requires_grad_()
    fresh = {k: leaf(call[k]) for k in ("x", *WEIGHTS, "bias") if k in call}
    state = tuple(map(leaf, call.get("state", ())))
    named = fresh | {f"state[{k}]": s for k, s in enumerate(state)}
    return {**call, **fresh, **({"state": state} if state else {})}, named


# Ranges of weights and inputs, and the bias of the forget gate
REGIMES = {
    "initial": (lambda *shape: torch.randn(*shape) / shape[-1] ** 0.5, 1.0, 0.0),
    "within .5": (lambda *shape: torch.rand(*shape) - 0.5, 1.0, 0.0),
    "within .5, wide gates": (lambda *shape: torch.rand(*shape) - 0.5, 3.0, 0.0),
    "within .9": (lambda *shape: 1.8 * torch.rand(*shape) - 0.9, 2.0, 0.0),
    "slow to forget": (lambda *shape: torch.rand(*shape) - 0.5, 1.0, -4.0),
    "slower": (lambda *shape: torch.rand(*shape) - 0.5, 1.0, -7.0),
    "unclipped": (lambda *shape: 2 * torch.randn(*shape), 1.0, 0.0),
}


def draw_regime(cell, regime: str, B: int, T: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [B, T, 3, D] and the weight [P, D] of one of REGIMES."""
    draw, reach, bias = REGIMES[regime]
    weight, x = draw(cell.weights, D), reach * torch.randn(B, T, 3, D)
    x[:, :, 0] += bias if cell.name == "flash_gru" else -bias
    return x, weight


def split(cell, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Splits a parameter of P rows [P, D] into the arguments a and p."""
    return (weight[:3], weight[3:]) if cell.weights > 3 else (weight,)


def parity(cell, bits: torch.Tensor, gain: float):
    """A 1 flips the state's sign, a 0 keeps it; returns x, weight [P, D], state."""
    on = torch.where(bits, 20.0, -20.0)
    zero, full = torch.zeros_like(on), torch.full_like(on, 20.0)
    weight = torch.zeros(cell.weights, bits.shape[-1])
    weight[2] = -gain
    rows = (on, full, zero) if cell.name == "flash_gru" else (-on, full, zero)
    states = [torch.ones(len(bits), bits.shape[-1]) for _ in range(cell.states)]
    return torch.stack(rows, 2), weight, tuple(states)
