"""Stacks several models of one class into one, so that seeds and learning rates share kernel calls.

A recurrent kernel runs heads, or channels, that do not see each other. S models of N heads each are
therefore one call with S N heads, as long as a single one on a GPU that one of them leaves idle.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import rms_norm, silu

from flashcell import load_kernel
from flashcell.layers.diagonal_mixer import DiagonalMixer
from flashcell.layers.diagonal_rnn import Bound, FlashGRU, FlashLSTM
from flashcell.layers.recurrent_mixer import RecurrentMixer
from flashcell.modeling_flash_mlstm import FlashMLSTMMixer, soft_cap
from synthetic_tasks.models import EPS, TaskModel

Named = dict[str, Tensor]  # name -> [S, *the parameter's shape]


class Stack:
    """S models of one class and shape; row s of `flat` [S, P] holds all parameters of model s.

    stack(tokens [S, B, T]) -> logits [B, T, S, V]: every model reads its own tokens. With
    at [S, B, n] logits [B, n, S, V] of these positions alone.
    """

    def __init__(self, models: Sequence[TaskModel]):
        self.model = models[0]
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        rows = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
        self.flat = torch.stack(rows).requires_grad_()
        self.mix = STACKED.get(type(self.model.mixer), mix_each)

    def __len__(self) -> int:
        return len(self.flat)

    def named(self) -> Named:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = self.flat.split(sizes, 1)
        return {
            name: part.unflatten(1, shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def __call__(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        p, model = self.named(), self.model
        table = p["embed.weight"]
        # One-hot rows times the table: the backward of an embedding is slow where few tokens occur often.
        every = torch.arange(table.shape[1], device=tokens.device)
        chosen = tokens.permute(1, 2, 0)[..., None] == every
        x = linear(chosen.to(table.dtype), table.transpose(1, 2))  # [B, T, S, 64]
        if len(model.positions):
            x = x + model.positions[: x.shape[1], None]
        x = norm(x, p.get("in_norm.weight"))
        x = self.mix(model.mixer, below(p, "mixer"), x)
        if at is not None:
            x = x.gather(1, at.permute(1, 2, 0)[..., None].expand(-1, -1, -1, x.shape[-1]))
        x = norm(x, p.get("out_norm.weight"))
        return linear(x, p["head.weight"], p.get("head.bias"))


def below(p: Named, prefix: str) -> Named:
    return {n.removeprefix(f"{prefix}."): t for n, t in p.items() if n.startswith(f"{prefix}.")}


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else rms_norm(x, x.shape[-1:], None, EPS) * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Applies one linear layer per model: x [B, T, S, I], weight [S, O, I], bias [S, O] -> [B, T,
    S, O].

    A product for each row of each model: the weights' gradient, a sum over B T, is then B sums that
    run at once, where a single small one would keep a GPU waiting for most of a step.
    """
    y = torch.matmul(x.permute(2, 0, 1, 3), weight.transpose(1, 2)[:, None]).permute(1, 2, 0, 3)
    return y if bias is None else y + bias


def side_by_side(x: Tensor) -> Tensor:
    """Joins the models' heads: [S, R, C, ...] -> [R, S C, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def mix_dense(mixer: RecurrentMixer, p: Named, x: Tensor) -> Tensor:
    G, N, D = mixer.num_gates, *mixer.gate_bias.shape[1:]
    gates = linear(x, p["in_proj.weight"]).unflatten(-1, (G, N, D))  # [B, T, S, G, N, D]
    gates = gates.transpose(2, 3).flatten(3, 4)
    weights = side_by_side(p["recurrent_weight"]), side_by_side(p["gate_bias"])
    kernel = load_kernel("fused-rnn", x.device.type, mixer.config.backend)
    h, _ = kernel.recurrent(mixer.cell, gates, *weights, None)  # [B, T, S N, D]
    return h.reshape(x.shape)


def mix_diagonal(cell: FlashGRU | FlashLSTM, p: Named, x: Tensor) -> Tensor:
    kernel = load_kernel("diagonal-rnn", x.device.type, cell.backend)
    N, G, J, I = cell.in_proj.weight.shape
    u = linear(
        x.unflatten(-1, (N, I)).flatten(2, 3), p["in_proj.weight"].flatten(0, 1).flatten(1, 2)
    )
    u = u.unflatten(-1, (G, J)).transpose(2, 3).flatten(3)  # [B, T, G, S N J], as a cell reads it
    u = u + side_by_side(p["in_proj.bias"])
    rows = [side_by_side(p[name]) for name in ("a", "p") if name in p]
    if cell.max_recurrent is not None:
        rows = [Bound.apply(row, cell.max_recurrent) for row in rows]
    h, _ = getattr(kernel, cell.kernel_cell)(u, *rows, backend=cell.backend)
    return h.view(x.shape)


def mix_diagonal_block(mixer: DiagonalMixer, p: Named, x: Tensor) -> Tensor:
    x, gate = linear(x, p["in_proj.weight"]).chunk(2, -1)
    weight, bias = p["conv.weight"].flatten(0, 1), p["conv.bias"].flatten()
    kernel = load_kernel("diagonal-rnn", x.device.type, mixer.cell.backend)
    backend = mixer.cell.backend if x.is_cuda else "reference"  # no CPU binary for this convolution
    y = kernel.causal_conv(x.flatten(2), weight[:, 0], bias, silu=True, backend=backend)
    x = y.view(x.shape)
    h = mix_diagonal(mixer.cell, below(p, "cell"), x.contiguous())
    return linear(norm((h + p["skip"] * x) * silu(gate), p["norm.weight"]), p["out_proj.weight"])


def mix_mlstm(mixer: FlashMLSTMMixer, p: Named, x: Tensor) -> Tensor:
    config = mixer.config

    def heads(name: str) -> Tensor:  # [B, T, S H, width of a head]
        y = linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
        return y.unflatten(-1, (config.num_heads, -1)).flatten(2, 3)

    q, k, v, o = (heads(name) for name in ("q", "k", "v", "ogate_preact"))
    gates = (heads(name)[..., 0] for name in ("igate_preact", "fgate_preact"))
    i, f = (soft_cap(gate, config.gate_soft_cap) for gate in gates)
    weight = p["multihead_norm.weight"].reshape(v.shape[2:])
    kernel = load_kernel("tfla", x.device.type, config.backend)
    h, _ = kernel.mlstm(
        q, k, v, i, f, input_gate=config.input_gate, eps=config.eps, out_gate=o,
        norm=config.head_norm, norm_weight=weight, norm_eps=config.norm_eps, backend=config.backend,
    )  # fmt: skip
    return linear(h.reshape(x.shape), p["out_proj.weight"])


def mix_each(mixer: nn.Module, p: Named, x: Tensor) -> Tensor:
    """Runs mixers that consist of torch operations only, vectorised over the models."""
    buffers = dict(mixer.named_buffers())

    def one(parameters: Named, x: Tensor) -> Tensor:
        return functional_call(mixer, {**parameters, **buffers}, (x,))

    return vmap(one, (0, 2), 2)(p, x)


STACKED: dict[type, Callable] = {
    RecurrentMixer: mix_dense,
    FlashGRU: mix_diagonal,
    FlashLSTM: mix_diagonal,
    DiagonalMixer: mix_diagonal_block,
    FlashMLSTMMixer: mix_mlstm,
}
