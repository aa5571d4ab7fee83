"""Shared code of flash_mlstm and flash_xlstm: the mLSTM call, and layers with an initialisation."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..hub.kernel_loader import load_kernel
from ..state.boundaries import Boundaries
from ..state.cache import RecurrentStateLayer, StaticRecurrentStateLayer
from ..state.replay import Replay, pays

State = tuple[torch.Tensor, ...]


# transformers initialises remote code module by module and skips modules without parameters of
# their own. So the initialisation of a layer depends on its class, or on its attribute `std`.


class GateLinear(nn.Linear):
    """A linear layer for gate pre-activations, initialised with zero weights and biases `start`.

    It has few rows, and quantisation tools leave it as it is."""

    kernel_adds_bias = True  # known_code.why_not_weights

    def __init__(self, inputs: int, start: torch.Tensor):
        super().__init__(inputs, len(start))
        self.start = start.tolist()

    def init_weights(self) -> None:
        init.zeros_(self.weight)
        init.copy_(self.bias, torch.tensor(self.start))


def residual_linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    """Returns an nn.Linear for a residual branch, marked to be initialised with deviation `std`.

    It is smaller than elsewhere: 2 / (L sqrt(fan)) for L blocks (Wang and Komatsuzaki 2021). It is
    no class of its own, because quantisation tools replace exactly nn.Linear."""
    linear: Any = nn.Linear(inputs, outputs, bias=False)
    linear.std = std
    return linear


class HeadNorm(nn.Module):
    """Holds the weight of a norm over each head's D values: "layer" (without bias) or "rms".

    The norm itself is computed together with h. forward() returns the weight [N, D]; callers go
    through forward because hooks that load an offloaded weight run there.
    """

    def __init__(self, heads: int, width: int, eps: float, kind: str = "layer"):
        super().__init__()
        self.heads, self.eps, self.kind = heads, eps, kind
        self.weight = nn.Parameter(torch.ones(width))

    def init_weights(self) -> None:
        init.ones_(self.weight)

    def forward(self) -> torch.Tensor:
        return self.weight.view(self.heads, -1)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:  # [..., N D] -> [..., N, D]
    width = x.shape[-1] // heads  # -1 would not do for no tokens
    # unflatten is opaque to Dynamo under a device context
    return x.view(*x.shape[:-1], heads, width)


def find_replay(
    kernel: Any, cache: Any, q: torch.Tensor, state: State, options: dict[str, Any]
) -> Replay | None:
    """Returns the ring of a recorded step's buffers, made at the first step, or None."""
    if cache.replay is None and cache.keeps_ring and pays(kernel, q):
        cache.replay = Replay(kernel, state, q.dtype, options)
    return cache.replay


def run_mlstm(
    config: Any,
    operands: tuple[torch.Tensor, ...],  # q, k [B, T, H, K], v [B, T, H, V], i, f [B, T, H]
    norm: HeadNorm,
    cache: RecurrentStateLayer | None,
    boundaries: Boundaries,
    out_gate: torch.Tensor | None = None,  # [B, T, H, V]
    **options: Any,  # passed to the kernel's mlstm and mlstm_step
) -> tuple[torch.Tensor, State]:
    """Runs the mLSTM: returns h [B, T, H V], normed and gated, and the new states; see the kernel.

    Decoding one token into a static cache updates its states in place.
    """
    q, backend = operands[0], config.backend
    options.update(norm=norm.kind, norm_weight=norm(), norm_eps=norm.eps, backend=backend)
    kernel = load_kernel("tfla", q.device.type, backend)
    state: Any = None if cache is None else boundaries.first(cache.get_states())
    if q.shape[1] == 1 and boundaries.none():
        buffers = isinstance(cache, StaticRecurrentStateLayer) and not torch.is_grad_enabled()
        given = [x[:, 0] for x in operands]
        options["out_gate"] = None if out_gate is None else out_gate[:, 0]
        inplace = buffers and state is not None
        replay = find_replay(kernel, cache, q, state, options) if inplace else None
        if replay is None:
            h, state = kernel.mlstm_step(*given, state, inplace=inplace, **options)
        else:
            h = kernel.mlstm_replay_step(*given, state, replay.ring, **options)
        h = h[:, None]
    else:
        options.update(boundaries._asdict(), chunk_size=config.chunk_size)
        h, state = kernel.mlstm(*operands, state, out_gate=out_gate, **options)
    return h.flatten(-2), boundaries.last(state)
