"""The mixer of flash_rnn: a layer that owns a cell's weights and calls its kernel."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..hub.kernel_loader import load_kernel
from ..kernels.fused_rnn.cells import CELLS
from ..state.boundaries import NO_BOUNDARIES, Boundaries
from ..state.cache import RecurrentStateLayer, own_states
from .decode_linear import StepLinear, apply_norm, operands


def forget_biases(width: int, layer: int, layers: int) -> torch.Tensor:  # [width]
    """Returns the initial forget biases of an sLSTM's head. They fall from 5 to -7 by a power law whose
    exponent grows with depth, so deeper blocks remember longer (xLSTM, arXiv 2405.04517, in its
    published code)."""
    depth = layer / max(layers - 1, 1)
    return 5.0 - 12.0 * torch.linspace(0, 1, width, device="cpu") ** (0.3 + 1.3 * depth)


class RecurrentMixer(nn.Module):
    """Projects the input to the gates and runs a recurrent cell over time, with several heads.

    The projection is an ordinary nn.Linear (LoRA, quantisation and sharding see it); the recurrent
    weight is not, and stays as it is.
    """

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.cell, heads, width = config.kernel_cell, config.num_heads, config.head_dim
        self.num_gates = CELLS[self.cell].gates
        self.in_proj = nn.Linear(
            config.hidden_size, self.num_gates * config.hidden_size, bias=False
        )
        self.recurrent_weight = nn.Parameter(torch.empty(self.num_gates, heads, width, width))
        self.gate_bias = nn.Parameter(torch.empty(CELLS[self.cell].bias_rows, heads, width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises recurrent matrices as orthogonal, each head and gate by itself (Saxe et al.
        2014).

        A state is kept at the start: the LSTM's forget gate has bias 1 (Jozefowicz et al. 2015), so
        has the GRU's update gate; for sLSTM see `forget_biases`.
        """
        weight, bias = self.recurrent_weight, self.gate_bias
        if weight.device.type == "meta":
            return
        matrices = torch.empty_like(weight, dtype=torch.float32)
        for matrix in matrices.flatten(0, 1):
            nn.init.orthogonal_(matrix)
        biases = torch.zeros_like(bias)
        if self.cell in ("lstm", "gru"):
            biases[1] = 1.0
        elif self.cell == "slstm":
            layers = self.config.num_hidden_layers
            biases[1] = forget_biases(bias.shape[-1], self.layer_idx, layers)
        init.copy_(weight, matrices)
        init.copy_(bias, biases)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        return self.mix(self.in_proj(hidden_states), cache, boundaries)

    @property
    def linears(self) -> list[nn.Linear]:
        return [self.in_proj]

    def step(
        self,
        step_linear: StepLinear,
        x: torch.Tensor,  # [B T, H]
        norm: nn.Module,
        cache: RecurrentStateLayer | None,
        T: int = 1,
    ) -> torch.Tensor:  # [B T, H]
        """Computes x + forward(norm(x)) for T tokens per row."""
        y, options = apply_norm(norm, x)
        gates = step_linear(y, **operands(self.in_proj), **options)[0]
        return x + self.mix(gates.unflatten(0, (-1, T)), cache, NO_BOUNDARIES).flatten(0, 1)

    def block_step(
        self,
        kernel: Any,
        x: torch.Tensor,  # [B, H]
        norm: nn.RMSNorm,
        mlp_norm: nn.RMSNorm,
        mlp: Any,  # a SwiGLU
        cache: RecurrentStateLayer | None,
    ) -> torch.Tensor:  # [B, H]
        """Computes the whole block around this mixer for one token per row."""
        shape, wide = (
            (x.shape[0], *self.gate_bias.shape[1:]),
            torch.promote_types(x.dtype, torch.float32),
        )
        empty = lambda: tuple(
            x.new_zeros(shape, dtype=wide) for _ in range(CELLS[self.cell].states)
        )
        state = own_states(cache, "cell", empty)
        given = operands(self.in_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        in_proj, *others = given.pop("weights")
        y = kernel.block_step(
            self.cell, x, norm.weight, in_proj, self.recurrent_weight, self.gate_bias, state,
            mlp_norm.weight, *others, **given, mixer_eps=norm.eps, mlp_eps=mlp_norm.eps,
        )  # fmt: skip
        if cache is not None:
            cache.update_states(1, cell=state)
        return y

    def has_wide_states(self, x: torch.Tensor, cache: RecurrentStateLayer | None) -> bool:
        """Whether the cache holds the states in the dtype that a step computes in, so no cast is
        needed."""
        group = None if cache is None else cache.get_states()
        wide = torch.promote_types(x.dtype, torch.float32)
        return all(s.dtype == wide for s in group or ())

    def mix(
        self,
        gates: torch.Tensor,  # [B, T, G H], what in_proj gives
        cache: RecurrentStateLayer | None,
        boundaries: Boundaries,
    ) -> torch.Tensor:  # [B, T, H]
        B, T, width = gates.shape
        x = gates.view(B, T, self.num_gates, *self.gate_bias.shape[1:])
        kernel = load_kernel("fused-rnn", x.device.type, self.config.backend)
        weights = self.recurrent_weight, self.gate_bias
        state = None if cache is None else boundaries.first(cache.get_states())
        if T == 1 and boundaries.none():
            h, state = kernel.recurrent_step(self.cell, x[:, 0], *weights, state)
        else:
            options = {
                **boundaries._asdict(),
                "grad_clip": self.config.grad_clip,
                "save": self.config.save,
            }
            h, state = kernel.recurrent(self.cell, x, *weights, state, **options)
        if cache is not None:
            cache.update_states(T, cell=boundaries.last(state))
        return h.reshape(B, T, width // self.num_gates)  # -1 would not do for B = 0
