"""The mixers of flash_xlstm (xLSTM, arXiv 2405.04517, in the form of the `xlstm` package).

Dense projections are nn.Linear. Block-diagonal ones are `HeadwiseLinear`, which tools that look for
nn.Linear do not see: LoRA on "all-linear" adds nothing to them, quantisation leaves them in the
model's dtype. They are small (qkv_block_size or a head's width per channel); to train them beside
LoRA, name them in PEFT's `modules_to_save`: qk_proj, v_proj, if_proj, zo_proj.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from ..hub.kernel_loader import load_kernel
from ..state.boundaries import NO_BOUNDARIES, Boundaries
from ..state.cache import RecurrentStateLayer
from .causal_conv import CausalConv1d, convolve
from .headwise_linear import HeadwiseLinear
from .mlstm import GateLinear, HeadNorm, residual_linear, run_mlstm, split_heads
from .recurrent_mixer import forget_biases

SLSTM_GATES = 4  # i, f, z, o


class InputGate(GateLinear):
    """The input gate of an mLSTM, initialised as in the `xlstm` package: random biases near 0."""

    def init_weights(self) -> None:
        super().init_weights()
        init.normal_(self.bias, std=0.1)


def residual(config: Any, inputs: int) -> nn.Linear:
    std = 2 / (config.num_hidden_layers * math.sqrt(config.hidden_size))
    return residual_linear(inputs, config.hidden_size, std)


class XLSTMMixer(nn.Module):
    """The mixer of an mLSTM block: up-projection, convolution, mLSTM, gate and down-projection.

    y = W_down ((norm(mlstm(q, k, v, i, f)) + skip u) silu(z))   with (x, z) = W_up s

    u = silu(conv(x));  q, k of u and v of x by block-diagonal projections;  i, f = W (q, k, v) + b.
    s, y [B, T, H]; inside the width is `inner_size`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config, width, heads = config, config.inner_size, config.num_heads
        blocks = width // config.qkv_block_size
        self.proj_up = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.conv = CausalConv1d(width, config.conv_kernel_size)
        self.qk_proj = HeadwiseLinear(width, width, 2, blocks, bias=False)
        self.v_proj = HeadwiseLinear(width, width, 1, blocks, bias=False)
        self.igate = InputGate(3 * width, torch.zeros(heads, device="cpu"))
        self.fgate = GateLinear(3 * width, torch.linspace(3.0, 6.0, heads, device="cpu"))
        self.head_norm = HeadNorm(heads, width, config.norm_eps)
        self.skip = nn.Parameter(torch.ones(width))
        self.proj_down = residual(config, width)

    def init_weights(self) -> None:
        init.ones_(self.skip)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        config = self.config
        x, z = self.proj_up(hidden_states).chunk(2, dim=-1)
        u, window = convolve(self.conv, x, cache, boundaries)
        q, k = self.qk_proj(u).unbind(-2)
        v = self.v_proj(x).squeeze(-2)
        qkv = torch.cat([q, k, v], dim=-1)
        heads = [split_heads(part, config.num_heads) for part in (q, k, v)]
        operands = (*heads, self.igate(qkv), self.fgate(qkv))
        h, state = run_mlstm(
            config, operands, self.head_norm, cache, boundaries, eps=config.eps
        )  # fmt: skip
        if cache is not None:
            cache.update_states(x.shape[1], cell=state, conv=window)
        return self.proj_down((h + self.skip * u) * F.silu(z))


class SLSTMMixer(nn.Module):
    """The mixer of an sLSTM block: convolution, head-wise projections, sLSTM and norm.

    y = norm(slstm(i, f, z, o))   with i, f of silu(conv(x)) and z, o of x, head by head

    x, y [B, T, H]. The recurrent weight [4, N, D, D] and the bias [4, N, D] are the kernel's.
    """

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width, heads = config.hidden_size, config.slstm_num_heads
        self.conv = CausalConv1d(width, config.conv_kernel_size)
        self.if_proj = HeadwiseLinear(width, width, 2, heads, bias=False)
        self.zo_proj = HeadwiseLinear(width, width, 2, heads, bias=False)
        head = width // heads
        self.recurrent_weight = nn.Parameter(torch.zeros(SLSTM_GATES, heads, head, head))
        self.gate_bias = nn.Parameter(torch.zeros(SLSTM_GATES, heads, head))
        self.head_norm = HeadNorm(heads, width, config.norm_eps)

    def init_weights(self) -> None:
        """Initialises the recurrent weights and all biases to 0, but for `forget_biases`."""
        biases = torch.zeros(self.gate_bias.shape)
        layers = self.config.num_hidden_layers
        biases[1] = forget_biases(biases.shape[-1], self.layer_idx, layers)
        init.zeros_(self.recurrent_weight)
        init.copy_(self.gate_bias, biases)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        backend, T = self.config.backend, hidden_states.shape[1]
        u, window = convolve(self.conv, hidden_states, cache, boundaries)
        gates = [self.if_proj(u), self.zo_proj(hidden_states)]
        x = split_heads(torch.cat(gates, dim=-2), self.gate_bias.shape[1])  # [B, T, 4, N, D]
        kernel = load_kernel("fused-rnn", x.device.type, backend)
        weights = self.recurrent_weight, self.gate_bias
        state = None if cache is None else boundaries.first(cache.get_states())
        if T == 1 and boundaries.none():
            h, state = kernel.slstm_step(x[:, 0], *weights, state, backend=backend)
            h = h[:, None]
        else:
            h, state = kernel.slstm(x, *weights, state, backend=backend, **boundaries._asdict())
        if cache is not None:
            cache.update_states(T, cell=boundaries.last(state), conv=window)
        h = F.layer_norm(h, h.shape[-1:], eps=self.config.norm_eps)
        return (h * self.head_norm().to(h.dtype)).reshape(hidden_states.shape)


class GeGLU(nn.Module):
    """The gated MLP after an sLSTM: down(gelu(gate) * up)   with (gate, up) = proj_up(x) (arXiv
    2002.05202)."""

    def __init__(self, config: Any):
        super().__init__()
        inner = config.intermediate_size
        self.proj_up = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.proj_down = residual(config, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., H] -> [..., H]
        gate, up = self.proj_up(x).chunk(2, dim=-1)
        return self.proj_down(F.gelu(gate) * up)
