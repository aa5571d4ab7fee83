"""The block GRU of DreamerV3, in torch: a cell, and its loop over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.fused_rnn.formulas import is_eager, views_of
from .headwise_linear import HeadwiseLinear

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, None: None}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "elu": F.elu, "tanh": torch.tanh,
}  # fmt: skip

Weights = dict[str, Tensor]
Product = dict[str, Any]  # y = a W^T of one step: its name, a and the gradient of y


class Step:
    """One step in torch: (what the first layer makes of x [..., N G J], h [..., D]) -> h' [..., D]."""

    def __init__(self, cell: Any, weights: Weights, record: list[Product] | None = None):
        self.cell, self.weights, self.record = cell, weights, record
        self.act = ACTIVATIONS[cell.activation]

    def __call__(self, read: Tensor, h: Tensor) -> Tensor:
        cell, lead = self.cell, h.shape[:-1]
        read, h = read.reshape(-1, read.shape[-1]), h.reshape(-1, h.shape[-1])
        R, N = len(h), cell.blocks
        width = read.shape[-1] // N
        a = self._by_blocks("own", h) + read.reshape(R, N, width)  # [R, N, G J]
        if cell.dense is not None:
            u = self._product("dense", h)
            u = u if cell.dense.bias is None else u + self.weights["dense_bias"]
            u = self.act(self._normalise("dense", cell.dense_norm, u))
            a = a + self._product("of_u", u).view(R, N, width)
        for number, (norm, following) in enumerate(zip(cell.hidden_norms, cell.later, strict=True)):
            a = self.act(self._normalise(number, norm, a.flatten(1)))
            a = self._by_blocks(f"layer {following}", a)
            bias = self.weights.get(f"bias {following}")
            a = a if bias is None else a + bias
        a = a.reshape(R, N, 3, h.shape[-1] // N).transpose(1, 2).flatten(1)  # [R, 3 D]
        reset, candidate, update = self._normalise("gates", cell.gate_norm, a).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return (h + torch.sigmoid(update - 1) * (candidate - h)).view(*lead, -1)

    def _product(self, name: str, a: Tensor) -> Tensor:
        y = F.linear(a, self.weights[name])
        return self._recorded(name, a, y)

    def _by_blocks(self, name: str, a: Tensor) -> Tensor:  # [R, N I] -> [R, N, G J]
        weight = self.weights[name]  # [N, G J, I]
        a = a.reshape(len(a), len(weight), weight.shape[-1]).transpose(0, 1)
        return self._recorded(name, a, torch.bmm(a, weight.mT)).transpose(0, 1)

    def _recorded(self, name: str, a: Tensor, y: Tensor) -> Tensor:
        if self.record is not None:
            product: Product = {"name": name, "a": a}
            self.record.append(product)
            y.register_hook(lambda dy: product.__setitem__("dy", dy))  # once a backward has run
        return y

    def _normalise(self, name: Any, norm: Any, a: Tensor) -> Tensor:
        weight, bias = (self.weights.get(f"norm {part} {name}") for part in ("weight", "bias"))
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(a, a.shape[-1:], weight, norm.eps)
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(a, a.shape[-1:], weight, bias, norm.eps)
        return a


def run(step: Step, read: Tensor, h: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs `step` over read [B, T, ...], from h [B, D]; returns h of every step and the last one."""
    hs = []
    for t, now in enumerate(read.unbind(1)):
        if reset is not None:
            h = h.masked_fill(reset[:, t, None], 0.0)
        h = step(now, h)
        hs.append(h)
    return torch.stack(hs, 1) if hs else h.new_zeros(len(h), 0, h.shape[-1]), h


class Recurrence(torch.autograd.Function):
    """Does what `run` does, with gradients of the weights that are one product for all steps: T small
    ones would read and write a whole gradient each."""

    @staticmethod
    def forward(ctx, cell, reset, names, read, h, *values):
        ctx.record, own = [], {}
        with torch.enable_grad():
            inner = [v.detach().requires_grad_() for v in (read, h)]
            for name, value in zip(names, values, strict=True):
                own[name] = value.detach().requires_grad_(not is_product(name))
            hs, last = run(Step(cell, own, ctx.record), inner[0], inner[1], reset)
        ctx.names, ctx.inner, ctx.own, ctx.outputs = names, inner, own, (hs, last)
        ctx.cell, ctx.reset = cell, reset
        ctx.save_for_backward(read, h, *values)
        return hs.detach(), last.detach().clone()

    @staticmethod
    def backward(ctx, dhs, dlast):
        if torch.is_grad_enabled():  # to be differentiated again
            inputs = views_of(ctx.saved_tensors)
            read, h, *values = inputs
            step = Step(ctx.cell, dict(zip(ctx.names, values, strict=True)))
            outputs = run(step, read, h, ctx.reset)
            needed = [v for v in inputs if v.requires_grad]
            options: Any = {"create_graph": True, "allow_unused": True}
            again = iter(torch.autograd.grad(outputs, needed, (dhs, dlast), **options))
            grads = [next(again) if v.requires_grad else None for v in inputs]
            return None, None, None, *grads
        others = [n for n in ctx.names if not is_product(n)]
        sources = [*ctx.inner, *(ctx.own[n] for n in others)]
        given = ctx.outputs, sources, (dhs, dlast)
        dread, dh, *rest = torch.autograd.grad(*given, retain_graph=True)  # fills in ctx.record
        of = dict(zip(others, rest, strict=True))
        for name in filter(is_product, ctx.names):
            steps = [product for product in ctx.record if product["name"] == name]
            # [..., T R, width]; dy has autocast's dtype, unlike a
            a, dy = (torch.cat([product[k] for product in steps], -2) for k in ("a", "dy"))
            of[name] = dy.mT @ a.to(dy.dtype)
        return None, None, None, dread, dh, *(of[n] for n in ctx.names)


def is_product(name: str) -> bool:
    return name in ("own", "dense", "of_u") or name.startswith("layer")


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
    waits for all others. The defaults are DreamerV3's of 2024, whose `hidden` is `dense` here. For
    DreamerV3 of 2023 and DreamerV2: `blocks=1, dense=None, layers=0, norm="layer", norm_gates=True,
    eps=1e-3` (and no bias).

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
