"""A causal depthwise convolution over tokens, as in Mamba, that does not cross document
boundaries."""

import torch
from torch import nn

from ..hub.kernel_loader import load_kernel
from ..state.boundaries import NO_BOUNDARIES, Boundaries
from ..state.cache import RecurrentStateLayer


class CausalConv1d(nn.Conv1d):
    """Convolves each channel over the last K tokens of the same document:

    y_t[d] = bias[d] + sum over j < K of weight[d, 0, K - 1 - j] x_(t - j)[d]

    where x_(t - j) is the j-th token before t of the same document, padding not counted, and 0
    before the document's first. weight [D, 1, K] and bias [D] are nn.Conv1d's, K = kernel_size.

    forward(x [B, T, D], window=None, boundaries, silu=False, backend="reference")
        -> y [B, T, D], or silu(y);  window [B, K - 1, D]

    `window` is the last K - 1 tokens of the document to be continued, zeros where it has fewer;
    None at a document's beginning. y at padding is unspecified. backend "auto", "cuda" or "cpu"
    takes diagonal-rnn's kernel where it has one: on CUDA, for K = 4, without padding.
    """

    def __init__(self, channels: int, kernel_size: int = 4, bias: bool = True):
        if kernel_size < 2:
            raise ValueError(f"kernel_size is {kernel_size}, but must be at least 2")
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)
        self.past = kernel_size - 1

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        window: torch.Tensor | None = None,
        boundaries: Boundaries = NO_BOUNDARIES,
        silu: bool = False,
        backend: str = "reference",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fits = x.is_cuda and self.past == 3 and x.shape[1] >= self.past
        if backend != "reference" and fits and boundaries.hold is None:
            return self._run_kernel(x, window, boundaries, silu, backend)
        y, window = self._run_torch(x, window, boundaries)
        return nn.functional.silu(y) if silu else y, window

    def _run_kernel(
        self, x: torch.Tensor, window: torch.Tensor | None, boundaries: Boundaries, silu: bool,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        kernel = load_kernel("diagonal-rnn", x.device.type, backend)
        reset, (B, T, _) = boundaries.reset, x.shape
        last = x[:, T - self.past :].clone()  # a cache must not keep all of x
        if not boundaries.none():
            document = number_documents(boundaries, B, T, 0, x.device)
            if reset is None:
                reset = nn.functional.pad(document[:, 1:-1] != document[:, :-2], (1, 0), value=True)
            same = document[:, T - self.past : T] == document[:, T:]
            last = last.masked_fill(~same[..., None], 0)
        y = kernel.causal_conv(
            x, self.weight[:, 0], self.bias, window, reset=reset, silu=silu, backend=backend
        )
        return y, last

    def _run_torch(
        self, x: torch.Tensor, window: torch.Tensor | None, boundaries: Boundaries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if window is None:
            window = x.new_zeros(x.shape[0], self.past, x.shape[2])
        seen = torch.cat([window.to(x.dtype), x], 1)  # [B, K - 1 + T, D]
        if boundaries.none() and x.shape[1]:  # torch's convolution needs a token
            return super().forward(seen.mT).mT, seen[:, x.shape[1] :].clone()
        lags, window = self._lags(seen, boundaries)
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight[:, 0].to(exact)
        y = x * weight[:, self.past]
        for j, lag in enumerate(lags, 1):
            y = y + lag * weight[:, self.past - j]
        return (y if self.bias is None else y + self.bias).to(x.dtype), window

    def _lags(
        self, seen: torch.Tensor, boundaries: Boundaries
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns the K - 1 tokens before each token, each [B, T, D], and those before the next
        token."""
        past, (B, total, _) = self.past, seen.shape
        document = number_documents(boundaries, B, total - past, past, seen.device)
        wanted = document[:, past:]  # [B, T + 1]
        source = torch.arange(past, total + 1, device=seen.device).expand(B, -1)
        rows = torch.arange(B, device=seen.device)[:, None]
        lags = []
        for j in range(1, past + 1):
            if boundaries.hold is None:
                here = slice(past - j, total + 1 - j)
                lag, known = seen[:, here], document[:, here]
            else:
                source = previous_token(boundaries.hold, past).gather(1, source)
                lag, known = seen[rows, source], document.gather(1, source)
            lags.append(lag.masked_fill((known != wanted)[..., None], 0))
        window = [lag[:, -1] for lag in reversed(lags)]
        return [lag[:, :-1] for lag in lags], torch.stack(window, 1)


def convolve(
    conv: CausalConv1d,
    x: torch.Tensor,  # [B, T, D]
    cache: RecurrentStateLayer | None,
    boundaries: Boundaries,
    backend: str = "reference",
) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
    """Returns a mixer's silu(conv(x)), continued from the window in its cache, and the new
    window."""
    past = None if cache is None else boundaries.first(cache.get_states("conv"))
    y, window = conv(x, None if past is None else past[0], boundaries, True, backend)
    if boundaries.hold is not None:  # a product weighs padding with 0, which does not stop a NaN
        y = y.masked_fill(boundaries.hold[..., None], 0.0)
    return y, (window,)


def previous_token(hold: torch.Tensor, past: int) -> torch.Tensor:
    """Returns the index of the last non-padding token before each, [B, past + T + 1]."""
    real = nn.functional.pad(~hold, (past, 0), value=True)
    at = torch.arange(real.shape[1], device=hold.device)
    last = torch.where(real, at, -1).cummax(1).values
    return nn.functional.pad(last, (1, 0), value=-1)


def number_documents(
    boundaries: Boundaries, B: int, T: int, past: int, device: torch.device
) -> torch.Tensor:
    """Returns the document numbers, [B, past + T + 1], of the window, of x and of the next token."""
    if boundaries.cu_seqlens is not None:  # the window belongs to no document: -1
        ends = boundaries.cu_seqlens[1:].to(device)
        at = torch.arange(T, dtype=ends.dtype, device=device)
        number = torch.searchsorted(ends, at, right=True)[None]
        number = nn.functional.pad(number, (past, 0), value=-1)
        return nn.functional.pad(number, (0, 1), value=len(ends) - 1)
    if boundaries.reset is None:
        return torch.zeros(B, past + T + 1, dtype=torch.long, device=device)
    return nn.functional.pad(boundaries.reset.long(), (past, 1)).cumsum(1)
