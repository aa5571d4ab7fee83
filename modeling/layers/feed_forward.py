"""What a block has besides its mixer: the norm and the gated MLP."""

import torch
from torch import nn


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """Returns an RMSNorm for "rms", or a LayerNorm without bias for "layer"."""
    return nn.RMSNorm(width, eps) if kind == "rms" else nn.LayerNorm(width, eps, bias=False)


def cast_once(x: torch.Tensor) -> torch.Tensor:
    """Casts x once to autocast's dtype, for several projections: they share one copy, also in
    their backward passes, and their gradients are summed in that dtype."""
    kind = x.device.type
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class SwiGLU(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., H] -> [..., H]
        x = cast_once(x)
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
