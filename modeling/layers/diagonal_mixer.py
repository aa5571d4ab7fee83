"""The mixer around a diagonal cell, as published with FlashGRU and FlashLSTM (arXiv 2510.21450)."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ..generation.known_code import has_weights_like
from ..hub.kernel_loader import load_kernel
from ..state.boundaries import NO_BOUNDARIES, Boundaries
from ..state.cache import RecurrentStateLayer, own_states
from .causal_conv import CausalConv1d, convolve
from .decode_linear import StepLinear, apply_norm, norm_options, operands
from .diagonal_rnn import FlashGRU, FlashLSTM
from .headwise_linear import HeadwiseLinear

CELLS: dict[str, Any] = {"flash_gru": FlashGRU, "flash_lstm": FlashLSTM}


class GatedRMSNorm(nn.RMSNorm):
    """Computes RMSNorm(x silu(gate)) (Mamba2, arXiv 2405.21060): the gate first, then the norm.

    The result has x's dtype, also under autocast, whose fp32 would move twice the bytes. The sum of
    squares is in fp32.
    """

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x * nn.functional.silu(gate)
        with maybe_autocast(x.device.type, enabled=False):
            weight = self.weight.to(x.dtype)
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class DiagonalMixer(nn.Module):
    """The published block around a diagonal cell: convolution, gate, norm and projections.

    y = W_out norm(h + D x, g)   with h = cell(x), x = silu(conv(x')), (x', g) = W_in u

    u, y [B, T, H]; the convolution is causal and depthwise, the skip D [H] is learned. The cell's
    input projection is block-diagonal (`HeadwiseLinear`): tools that look for nn.Linear (LoRA,
    quantisation, sharding) see W_in and W_out, and leave the cell as it is.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv = CausalConv1d(width, config.conv_kernel)
        self.cell = CELLS[config.cell](
            width, width, config.num_heads, max_recurrent=config.max_recurrent
        )
        self.skip = nn.Parameter(torch.ones(width))
        self.norm = GatedRMSNorm(width, config.norm_eps)
        self.out_proj = nn.Linear(width, width, bias=False)

    def init_weights(self) -> None:
        """Initialises the mixer's own weights; its submodules initialise theirs, see mlstm.py."""
        init.ones_(self.skip)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, H]
        cache: RecurrentStateLayer | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> torch.Tensor:  # [B, T, H]
        h, gate = self.mix(self.in_proj(hidden_states), cache, boundaries)
        return self.out_proj(self.norm(h, gate))

    @property
    def linears(self) -> list[nn.Linear]:
        return [self.in_proj, self.out_proj]

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
        pair = step_linear(y, **operands(self.in_proj), **options)[0]
        kernel, options = self.find_kernel(x), {}
        if kernel is None or T > 1:
            y = self.norm(*self.mix(pair.unflatten(0, (-1, T)), cache, NO_BOUNDARIES)).flatten(0, 1)
        else:
            y, options = self.mix_step(kernel, pair, cache), norm_options(self.norm)
        return step_linear(y, **operands(self.out_proj), residual=x, **options)[0]

    def find_kernel(self, x: torch.Tensor) -> Any:
        """Returns the kernel whose `mix_step` runs this mixer on x [B, H], or None: call the
        modules."""
        if not self.is_plain(x):
            return None
        kernel = load_kernel("diagonal-rnn", x.device.type, self.config.backend)
        return None if kernel.BACKEND is None or self.config.backend == "reference" else kernel

    def is_plain(self, x: torch.Tensor) -> bool:
        """Whether the modules between the linear layers are unmodified and of sizes that the kernel
        has."""
        cell, config = self.cell, self.config
        kinds = {CausalConv1d: self.conv, CELLS[config.cell]: cell}
        kinds |= {HeadwiseLinear: cell.in_proj, GatedRMSNorm: self.norm}
        own = all(type(m) is kind and has_weights_like(m, x) for kind, m in kinds.items())
        return (
            own and self.skip.dtype == x.dtype and self.conv.past == 3 and config.head_dim % 2 == 0
        )

    def mix_step(
        self,
        kernel: Any,
        pair: torch.Tensor,  # [B, 2 H]
        cache: RecurrentStateLayer | None,
    ) -> torch.Tensor:  # [B, H], ahead of the norm
        x, gate = pair.chunk(2, -1)
        conv, cell = self.conv, self.cell
        wide = torch.promote_types(x.dtype, torch.float32)
        shape = x.shape[0], conv.past, x.shape[1]
        (window,) = own_states(cache, "conv", lambda: (x.new_zeros(shape),))
        empty = lambda: tuple(torch.zeros_like(x, dtype=wide) for _ in range(cell.states))
        state = own_states(cache, "cell", empty)
        x = kernel.conv_step(x, conv.weight[:, 0], conv.bias, window)
        y = kernel.mixer_step(
            cell.kernel_cell, x, cell.in_proj.weight, cell.in_proj.bias, cell.rows, state,
            self.skip, gate, bound=cell.max_recurrent,
        )  # fmt: skip
        if cache is not None:
            cache.update_states(1, cell=state, conv=(window,))
        return y

    def mix(
        self,
        pair: torch.Tensor,  # [B, T, 2 H], x' and g
        cache: RecurrentStateLayer | None,
        boundaries: Boundaries,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # h + D x, g [B, T, H]
        T, config = pair.shape[1], self.config
        state = None if cache is None else boundaries.first(cache.get_states("cell"))
        x, gate = pair.chunk(2, -1)
        x, window = convolve(self.conv, x, cache, boundaries, config.backend)
        path = {name: getattr(config, name) for name in ("method", "tol", "max_iters", "backend")}
        h, state = self.cell(x, state, **boundaries._asdict(), **path)
        if cache is not None:
            cache.update_states(T, cell=boundaries.last(state), conv=window)
        return torch.addcmul(h, x, self.skip.to(h.dtype)), gate  # in h's dtype, also under autocast
