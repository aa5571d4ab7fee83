"""Causal depthwise convolution that knows padding and documents, and carries its window."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .boundaries import NO_BOUNDARIES, Boundaries


class CausalConv(nn.Module):
    """y_t = bias + sum over j of weight[:, 0, W-1-j] x_{t-j}: every channel over its last W tokens.

    CausalConv(width, kernel_size=4, bias=True): weight [D, 1, W] and bias [D], as nn.Conv1d has them.
    forward(x [B, T, D], window=None, boundaries) -> y [B, T, D], window. The window [B, W-1, D], in
    x's dtype, is what a later call continues from: the last tokens before it, zeros at the start.
    `reset` and `cu_seqlens` empty the window before a document. Held tokens are padding: they do
    not enter the window, as if they were not there, and their own y means nothing.
    """

    def __init__(self, width: int, kernel_size: int = 4, bias: bool = True):
        super().__init__()
        if width < 1 or kernel_size < 2:
            raise ValueError(
                f"width is {width} and kernel_size {kernel_size}, but must be at least 1 and 2"
            )
        self.weight = nn.Parameter(torch.empty(width, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Conv1d: uniform within 1 / sqrt(W)."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: torch.Tensor,  # [B, T, D]
        window: torch.Tensor | None = None,  # [B, W-1, D]
        boundaries: Boundaries = NO_BOUNDARIES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.weight.shape[-1] - 1
        if window is None:
            window = x.new_zeros(x.shape[0], before, x.shape[2])
        if x.shape[1] == 0 or not boundaries.none:  # conv1d refuses T = 0
            return self._bounded(x, window.to(x.dtype), boundaries)
        tokens = torch.cat([window.to(x.dtype), x], 1)
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.conv1d(tokens.mT, weight, bias, groups=x.shape[2]).mT
        return y, tokens[:, x.shape[1] :]

    def _bounded(
        self, x: torch.Tensor, window: torch.Tensor, boundaries: Boundaries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Real tokens move together, and a tap counts if it lies in the document of its token."""
        (B, T, D), before = x.shape, window.shape[1]
        begins = self._begins(x, boundaries)  # [B, T + 1]
        count = torch.full((B, 1), T, device=x.device)
        place = None
        if boundaries.hold is not None:
            order = boundaries.hold.long().argsort(dim=1, stable=True)  # real tokens first
            place = order.argsort(dim=1)
            count = T - boundaries.hold.sum(1, keepdim=True)
            x = x.gather(1, order[..., None].expand_as(x))
            begins = torch.cat([begins[:, :T].gather(1, order), begins[:, T:]], 1)
        tokens = torch.cat([window, x], 1)
        document = begins.long().cumsum(1)  # 0 continues the window; at T, the last one
        documents = F.pad(document[:, :T], (before, 0))  # [B, W-1 + T], of `tokens`
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.new_zeros(1, dtype=wide) if self.bias is None else self.bias.to(wide)
        for j in range(before + 1):
            seen = documents[:, j : j + T] == document[:, :T]
            tap = tokens[:, j : j + T].masked_fill(~seen[..., None], 0.0)
            y = y + self.weight[:, 0, j].to(wide) * tap
        y = y.to(x.dtype)
        if place is not None:
            y = y.gather(1, place[..., None].expand_as(y))
        last = count + torch.arange(before, device=x.device)  # [B, W-1], where in `tokens`
        kept = tokens.gather(1, last[..., None].expand(B, before, D))
        seen = documents.gather(1, last) == document[:, T:]
        return y, kept.masked_fill(~seen[..., None], 0.0)

    @staticmethod
    def _begins(x: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
        """[B, T + 1] bool: a document begins before this token; at T, if an empty one ends the row."""
        B, T, _ = x.shape
        begins = torch.zeros(B, T + 1, dtype=torch.bool, device=x.device)
        if boundaries.cu_seqlens is not None:
            begins[0, boundaries.cu_seqlens[:-1].long()] = True
        if boundaries.reset is not None:
            begins[:, :T] |= boundaries.reset
        return begins
