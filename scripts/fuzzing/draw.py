"""Random choices and tensors of one fuzzed call, and the table of makers.

A maker takes a `Draw` and returns the arguments of one valid call of a public function, by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT = (torch.float32, torch.float64)  # small errors show in these: two calls in three
MAKERS: dict[str, Callable[[Draw], dict[str, Any]]] = {}


class Draw:
    """Random choices and tensors of one call; the same seed gives the same ones."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)
        self.generator = torch.Generator("cpu").manual_seed(self.rng.getrandbits(48))
        self.io = self.pick((*FLOATS, *EXACT))
        self.raw = False  # whether the tensors go to a raw op, without the public function's checks

    def pick(self, values: Any) -> Any:
        return self.rng.choice(list(values))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.io == torch.float64 else torch.float32

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Any:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (scale * values).to(dtype or self.io)

    def parameter(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Draws a parameter in x's dtype or, as under autocast, in another one."""
        return self.normal(
            *shape, scale=scale, dtype=self.pick(FLOATS) if self.chance(0.2) else None
        )

    def eight_bits(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws int8 in a matrix's shape, and scales with which its values have the same size."""
        bits = torch.randint(-128, 128, weight.shape, generator=self.generator, dtype=torch.int8)
        largest = weight.double().abs().amax(1) if weight.shape[1] else weight.new_ones(len(weight))
        return bits, (largest / 127).float()

    def four_bits(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws int4 for a matrix [N, K], K a multiple of 32, and scales like its values."""
        N, K = weight.shape
        bits = torch.randint(256, (N, K // 2), generator=self.generator, dtype=torch.uint8)
        return bits, self.normal(N, K // 32, scale=K**-0.5 / 8 if K else 1.0, dtype=torch.bfloat16)

    def maybe(self, value: Any, p: float = 0.5) -> Any:
        return value if self.chance(p) else None

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.3

    def backend(self) -> str:
        return self.pick(("auto", "auto", "cpu"))

    def rows(self, most: int = 7) -> tuple[int, int, int, dict[str, Any]]:
        """Draws B, T, the number of sequences, and the mask arguments of a sequence call."""
        B, T = self.pick((1, 1, 2, 3, 5, 0)), self.rng.choice((0, 1, 1, 2, 3, most))
        masks: dict[str, Any] = {}
        S = B
        if self.chance(0.2):
            S = self.rng.randint(0, 4)
            cuts = sorted(self.rng.randint(0, T) for _ in range(S - 1))
            B, T = 1, T if S else 0
            offsets = [0, *cuts, T] if S else [0]
            masks["cu_seqlens"] = torch.tensor(offsets, dtype=self.pick((torch.int32, torch.int64)))
        elif self.chance(0.2):
            lengths = [self.rng.randint(0, T) for _ in range(B)]
            masks["lengths"] = torch.tensor(lengths, dtype=self.pick((torch.int32, torch.int64)))
        for name in ("reset", "hold"):
            if self.chance(0.3):
                masks[name] = self.mask(B, T)
        return B, T, S, masks


def maker(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        for name in names:
            MAKERS[name] = lambda draw, name=name: function(draw, name)
        return function

    return register


def with_gradient(value: Any, wants: Callable[[], bool] = lambda: True) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and wants():
        return value.requires_grad_()
    if isinstance(value, (tuple, list)):
        return getattr(type(value), "_make", type(value))([with_gradient(v, wants) for v in value])
    return value
