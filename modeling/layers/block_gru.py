"""The block GRU of DreamerV3, in torch: a cell, and its loop over time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.fused_rnn.formulas import is_eager
from .block_gru_step import ACTIVATIONS, Recurrence, Step, Weights, run
from .headwise_linear import HeadwiseLinear

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, None: None}


class BlockGRUCell(nn.Module):
    """The deterministic part of DreamerV3's world model (arXiv 2301.04104): a gated recurrent unit
    whose matrices have a block for each of `blocks` groups of units.

        u = act(norm(U h + b))                  what all blocks read of all units
        a = act(norm(W [h, u, x] + b))          `layers` times; in the first, a block reads its own h,
                                                and all of u and x; later ones read their block of a
        r, c, z = G a + b                       of each unit; normalised where `norm_gates`
        h' = z' tanh(r' c) + (1 - z') h         r' = sigmoid(r), z' = sigmoid(z - 1)

    x [..., input_size], h [..., hidden_size] -> h' [..., hidden_size]. x is what the model has made of
    the action and the latent state. Norms go over the whole width, so that every unit of a step
    waits for all others. As DreamerV3 of 2024 the defaults, with `dense` its `hidden`; as DreamerV3
    of 2023 and DreamerV2 `blocks=1, dense=None, layers=0, norm="layer", norm_gates=True, eps=1e-3`
    (and no bias).

    `dense` is the width of u, or None for no u. Weights are drawn from a truncated normal of
    variance 1 / fan-in, biases are 0.
    """

    def __init__(
        self, input_size: int, hidden_size: int, blocks: int = 8, dense: int | None = 256,
        layers: int = 1, norm: str | None = "rms", activation: str = "silu",
        norm_gates: bool = False, eps: float = 1e-4, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        for name, value, least in (
            ("input_size", input_size, 0), ("hidden_size", hidden_size, 1), ("blocks", blocks, 1),
            ("layers", layers, 0), ("dense", 1 if dense is None else dense, 1),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, but must be an int >= {least}")
        if hidden_size % blocks:
            raise ValueError(
                f"hidden_size is {hidden_size}, but must be a multiple of blocks = {blocks}"
            )
        for name, given, choices in (
            ("norm", norm, NORMS), ("activation", activation, ACTIVATIONS),
        ):  # fmt: skip
            if given not in choices:
                named = ", ".join(map(repr, choices))
                raise ValueError(f"{name} is {given!r}, but must be one of {named}")
        self.input_size, self.hidden_size, self.blocks = input_size, hidden_size, blocks
        self.activation, self.norm_gates = activation, norm_gates
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        kind = NORMS[norm]
        make_norm = lambda size: nn.Identity() if kind is None else kind(size, eps=eps, **place)
        self.dense = self.dense_norm = None
        if dense is not None:
            self.dense = nn.Linear(hidden_size, dense, bias=bias, **place)
            self.dense_norm = make_norm(dense)
        read = hidden_size + blocks * (input_size + (dense or 0))  # by all blocks together
        widths = [read] + [hidden_size] * layers
        linear = lambda width, gates: HeadwiseLinear(
            width, hidden_size, gates, blocks, bias=bias, **place
        )
        self.hidden = nn.ModuleList([linear(width, 1) for width in widths[:-1]])
        self.hidden_norms = nn.ModuleList([make_norm(hidden_size) for _ in widths[:-1]])
        self.gates = linear(widths[-1], 3)
        self.later: list[Any] = [*range(layers), "gates"][1:]  # the layers after the first
        self.gate_norm = make_norm(3 * hidden_size) if norm_gates else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, HeadwiseLinear)):
                # The standard deviation of a normal cut at twice its own is 0.88 of that.
                std = 1 / (0.87962566103423978 * math.sqrt(module.weight.shape[-1]))
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                module.reset_parameters()

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        self._check(x, h, x.shape[:-1] if isinstance(x, Tensor) else ())
        if h is None:
            h = x.new_zeros(*x.shape[:-1], self.hidden_size)
        weights, of_x = self._weights()
        return Step(self, weights)(self._read(x, of_x), h)

    def _weights(self) -> tuple[Weights, Tensor]:
        """Returns what a step reads, by name, and what the first layer makes of x. The first layer's
        weight is in three parts: a block's own units, u, and x."""
        first: Any = self.hidden[0] if self.hidden else self.gates
        weight, own = first.weight, self.hidden_size // self.blocks
        dense = 0 if self.dense is None else self.dense.out_features
        of_h, of_u, of_x = weight.split([own, dense, self.input_size], -1)  # [N, G, J, ...]
        found: Weights = {"own": of_h.flatten(1, 2)}
        if self.dense is not None:
            found |= {"dense": self.dense.weight, "of_u": of_u.flatten(0, 2)}
            found |= {"dense_bias": self.dense.bias} if self.dense.bias is not None else {}
        for name in self.later:
            layer = self.gates if name == "gates" else self.hidden[name]
            found[f"layer {name}"] = layer.weight.flatten(1, 2)
            if layer.bias is not None:
                found[f"bias {name}"] = self._bias_by_blocks(layer)
        norms = [
            ("dense", self.dense_norm),
            *enumerate(self.hidden_norms),
            ("gates", self.gate_norm),
        ]
        for name, norm in norms:
            for part in ("weight", "bias"):
                if getattr(norm, part, None) is not None:
                    found[f"norm {part} {name}"] = getattr(norm, part)
        return found, of_x.flatten(0, 2)

    def _read(self, x: Tensor, of_x: Tensor) -> Tensor:  # [..., I] -> [..., N G J]
        """Returns what the first layer makes of x, with its bias."""
        first: Any = self.hidden[0] if self.hidden else self.gates
        y = F.linear(x, of_x)
        if first.bias is None:
            return y
        return y + self._bias_by_blocks(first).flatten()

    def _bias_by_blocks(self, layer: Any) -> Tensor:  # [G, D] -> [N, G J]
        return layer.bias.view(layer.gates, self.blocks, -1).transpose(0, 1).flatten(1)

    def _check(self, x: Tensor, h: Tensor | None, lead: Any) -> None:
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != self.input_size:
            raise ValueError(f"x {_shown(x)}, but must be [..., {self.input_size}]")
        want = (*lead, self.hidden_size)
        if h is not None and (not isinstance(h, Tensor) or h.shape != want):
            raise ValueError(f"h {_shown(h)}, but must be {list(want)}")

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, blocks={self.blocks}"


class BlockGRU(BlockGRUCell):
    """`BlockGRUCell` over time, for inputs that do not depend on h: what is read of x is one product for
    all steps. In DreamerV3 the latent state is sampled step by step from h: there the cell runs.

    x [B, T, input_size], h [B, hidden_size] or None for zeros, reset [B, T] bool: h is emptied before a
    marked step, where an episode begins -> h of every step [B, T, hidden_size] and the last one.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, h: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(x, Tensor) and x.dim() != 3:
            raise ValueError(f"x {_shown(x)}, but must be [B, T, {self.input_size}]")
        self._check(x, h, x.shape[:1] if isinstance(x, Tensor) else ())
        B, T = x.shape[:2]
        if reset is not None:
            if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
                had = f"has dtype {reset.dtype}" if isinstance(reset, Tensor) else _shown(reset)
                raise TypeError(f"reset {had}, but must be a tensor of dtype torch.bool")
            if reset.shape != (B, T):
                raise ValueError(f"reset {_shown(reset)}, but must be [{B}, {T}]")
        h = x.new_zeros(B, self.hidden_size) if h is None else h
        weights, of_x = self._weights()
        read = self._read(x, of_x)
        given = (read, h, *weights.values())
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if T == 0 or not recorded or not is_eager():  # transforms and traces follow the loop
            return run(Step(self, weights), read, h, reset)
        return Recurrence.apply(self, reset, tuple(weights), *given)


def _shown(value: Any) -> str:
    tensor = isinstance(value, Tensor)
    return f"has shape {list(value.shape)}" if tensor else f"is a {type(value).__name__}"
