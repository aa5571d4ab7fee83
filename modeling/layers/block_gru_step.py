"""A step of the block GRU as a function of its weights, and its loop over time (block_gru.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
}


Weights = dict[str, Tensor]


class Product:
    """A product y = a W^T of one step, and the gradient of y once a backward has run."""

    def __init__(self, name: str, a: Tensor):
        self.name, self.a = name, a
        self.dy: Any = None

    def keep(self, dy: Tensor) -> None:
        self.dy = dy


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
            self.record.append(Product(name, a))
            y.register_hook(self.record[-1].keep)
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
            read, h, *values = ctx.saved_tensors
            step = Step(ctx.cell, dict(zip(ctx.names, values, strict=True)))
            outputs = run(step, read, h, ctx.reset)
            needed = [v for v in ctx.saved_tensors if v.requires_grad]
            options: Any = {"create_graph": True, "allow_unused": True}
            again = iter(torch.autograd.grad(outputs, needed, (dhs, dlast), **options))
            return (
                None,
                None,
                None,
                *(next(again) if v.requires_grad else None for v in ctx.saved_tensors),
            )
        others = [n for n in ctx.names if not is_product(n)]
        sources = [*ctx.inner, *(ctx.own[n] for n in others)]
        given = ctx.outputs, sources, (dhs, dlast)
        dread, dh, *rest = torch.autograd.grad(*given, retain_graph=True)  # fills in ctx.record
        grads = dict(zip(others, rest, strict=True))
        for name in filter(is_product, ctx.names):
            steps = [product for product in ctx.record if product.name == name]
            a = torch.cat([product.a for product in steps], -2)  # [..., T R, width]
            dy = torch.cat([product.dy for product in steps], -2)  # autocast's dtype, unlike a
            grads[name] = dy.mT @ a.to(dy.dtype)
        return None, None, None, dread, dh, *(grads[n] for n in ctx.names)


def is_product(name: str) -> bool:
    return name in ("own", "dense", "of_u") or name.startswith("layer")
