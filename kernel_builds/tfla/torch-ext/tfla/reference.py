"""mLSTM in torch, differentiable by autograd: step by step, and chunk by chunk (one chunk of all T is
the parallel form). Ground truth, and the last fallback.

    m_t = max(lf_t + m_{t-1}, li_t)                            0 for the sigmoid gate
    C_t = e^(lf_t + m_{t-1} - m_t) C_{t-1} + e^(li_t - m_t) k_t v_t^T        n_t likewise, of k_t
    h_t = C_t^T q_t / (max(|n_t q_t|, e^-m_t) + eps)           numerator alone if not normalised

lf = logsigmoid(f); li = i or logsigmoid(i); q is scaled by K^-1/2. m only fixes the scale in which C
and n are kept (xLSTM, arXiv 2405.04517; Tiled Flash Linear Attention, arXiv 2503.14376), so it
carries no gradient; at eps = 0 the gradient is exact all the same. A reset makes the state the empty
one: C = n = m = 0. Gates are summed in float64, so that large ones cancel exactly.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch.nn.functional import layer_norm, logsigmoid

from .cells import Cell
from .sequences import lower_masks, state_dtype

# Lower bound of a log gate: its exponential is 0 in every dtype, and sums of it stay finite.
SHUT = -1000.0
NEVER = -(2.0**100)  # lower bound of an exponential input gate, which no state dtype rounds
INF = float("inf")


class State(NamedTuple):
    """The state of a sequence; n and m are None if the cell has none."""

    C: torch.Tensor  # [B, H, K, V], true value C e^m
    n: Optional[torch.Tensor]  # [B, H, K]
    m: Optional[torch.Tensor]  # [B, H]


LEAST_EPS = torch.finfo(torch.float32).tiny  # of a norm: rows of zeros, such as padding, stay zeros


class Options(NamedTuple):
    cell: Cell
    eps: float = 0.0
    normalizer_grad: bool = True


def empty_state(cell: Cell, k: torch.Tensor, v: torch.Tensor) -> State:
    B, _, H, K = k.shape
    zeros = lambda *shape: k.new_zeros(B, H, *shape, dtype=state_dtype(k.dtype))
    n = zeros(K) if cell.normalized else None
    return State(zeros(K, v.shape[-1]), n, zeros() if cell.exponential else None)


def log_gates(cell: Cell, i, f, hold) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns li, lf [B, T, H] in float64; a held step neither decays nor adds."""
    i, f = i.double(), f.double()
    log_i = i.clamp_min(NEVER) if cell.exponential else logsigmoid(i).clamp_min(SHUT)
    log_f = logsigmoid(f).clamp_min(SHUT)
    if hold is not None:
        log_i = log_i.masked_fill(hold[..., None], -INF)
        log_f = log_f.masked_fill(hold[..., None], 0.0)
    return log_i, log_f


def finite(m: torch.Tensor) -> torch.Tensor:
    """Returns m as a shift; where nothing was ever added (m = -inf) any shift is right."""
    return m.masked_fill(m == -INF, 0.0)


def divide(numerator, denominator, m, options: Options) -> torch.Tensor:
    size = torch.maximum(denominator.abs(), torch.exp(-m))
    if not options.normalizer_grad:
        size = size.detach()
    return numerator / (size + options.eps)[..., None]


def recurrent(q, k, v, i, f, reset, hold, state: State, options: Options):
    """Computes h [B, T, H, V] in the state dtype, and the last state, one step after another."""
    cell, dtype = options.cell, state.C.dtype
    log_i, log_f = log_gates(cell, i, f, hold)
    q, k, v = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
    C, n, m = state
    m = k.new_zeros(k.shape[0], k.shape[2]) if m is None else m
    n = torch.zeros_like(C[..., 0]) if n is None else n
    outputs = []
    for t in range(k.shape[1]):
        if reset is not None:
            cleared = reset[:, t, None]
            C, n, m = (
                s.masked_fill(cleared.view(-1, *[1] * (s.dim() - 1)), 0.0) for s in (C, n, m)
            )
        after = torch.maximum(log_f[:, t] + m, log_i[:, t]).to(dtype).detach()
        after = after if cell.exponential else torch.zeros_like(m)
        keep = torch.exp(log_f[:, t] + m - finite(after)).to(dtype)
        add = torch.exp(log_i[:, t] - finite(after)).to(dtype)[..., None] * k[:, t]
        C = keep[..., None, None] * C + add[..., None] * v[:, t, :, None]
        n, m = keep[..., None] * n + add, after
        h = torch.einsum("bhk,bhkv->bhv", q[:, t], C)
        if cell.normalized:
            h = divide(h, (q[:, t] * n).sum(-1), m, options)
        outputs.append(h if hold is None else h.masked_fill(hold[:, t, None, None], 0.0))
    h = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return h, State(C, n if cell.normalized else None, m if cell.exponential else None)


def chunkwise(q, k, v, i, f, reset, hold, state: State, options: Options, size: int):
    """Does the same by chunks of `size` steps: products inside a chunk, the state between chunks."""
    dtype = state.C.dtype
    log_i, log_f = log_gates(options.cell, i, f, hold)
    q, k, v = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
    outputs = []
    for t in range(0, k.shape[1], size):
        part = slice(t, t + size)
        cleared = None if reset is None else reset[:, part]
        given = (q[:, part], k[:, part], v[:, part], log_i[:, part], log_f[:, part])
        h, state = chunk(*given, cleared, state, options)
        outputs.append(h)
    h = torch.cat(outputs, 1) if outputs else torch.zeros_like(v)
    return h if hold is None else h.masked_fill(hold[..., None, None], 0.0), state


def run_chunks(q, k, v, i, f, state: Optional[State], masks, options: Options, size: int):
    """`chunkwise` for what the op takes: masks are reset, hold, lengths and cu_seqlens, an absent state
    is empty, and without q only the state counts."""
    lowered = [lower_masks(t, *masks) for t in (k if q is None else q, k, v, i, f)]
    rows = lowered[0]
    q, k, v, i, f = (one.x for one in lowered)
    state = empty_state(options.cell, k, v) if state is None else state
    h, last = chunkwise(q, k, v, i, f, rows.reset, rows.hold, state, options, size)
    return rows.unpack(h), last


def chunk(q, k, v, log_i, log_f, reset, state: State, options: Options):
    """Uses W_tj = e^(b_t - b_j + li_j - m_t) q_t k_j for j <= t in t's document, b = cumsum(lf)."""
    cell, dtype = options.cell, state.C.dtype
    L = k.shape[1]
    C, n, m = state
    b = log_f.cumsum(1)
    steps = torch.arange(L, device=k.device)
    seen = (steps[:, None] >= steps).expand(k.shape[0], L, L)
    first, start, before = (
        torch.ones_like(seen[:, 0]),
        b,
        b.new_zeros(1) if m is None else m[:, None],
    )
    if reset is not None:  # documents see only themselves, and start from the empty state
        document = reset.cumsum(1)
        seen, first = seen & (document[:, :, None] == document[:, None]), document == 0
        begin = torch.where(reset, steps, 0).cummax(1).values[..., None].expand_as(b)
        lost = log_f.isnan()
        count = lost.cumsum(1)
        b = log_f.masked_fill(lost, 0.0).cumsum(1)  # a NaN stays in its own document's sums
        b = b.masked_fill(count > (count - lost.long()).gather(1, begin), float("nan"))
        start = b - (b - log_f).gather(1, begin)
        before = (
            before * first[..., None] if m is None else torch.where(first[..., None], before, 0.0)
        )
    log_w = (b[:, :, None] - b[:, None] + log_i[:, None]).masked_fill(~seen[..., None], -INF)
    start = start + before
    after = torch.maximum(log_w.amax(2), start) if cell.exponential else torch.zeros_like(b)
    after = after.to(dtype).detach()
    shift = finite(after)
    decay = torch.exp(log_w - shift[:, :, None]).to(dtype)  # [B, t, j, H]
    inflow = torch.exp(start.masked_fill(~first[..., None], -INF) - shift).to(dtype)
    W = decay * torch.einsum("bthk,bjhk->btjh", q, k)
    h = torch.einsum("btjh,bjhv->bthv", W, v)
    gone = ~first[..., None]  # after a reset not even a NaN of the old state counts
    q_C = torch.einsum("bthk,bhkv->bthv", q, C).masked_fill(gone[..., None], 0.0)
    h = h + inflow[..., None] * q_C
    keep, add, gone = inflow[:, -1], decay[:, -1, ..., None] * k, gone[:, -1]
    if n is not None:
        q_n = torch.einsum("bthk,bhk->bth", q, n).masked_fill(~first[..., None], 0.0)
        h = divide(h, W.sum(2) + inflow * q_n, shift, options)
        n = keep[..., None] * n.masked_fill(gone[..., None], 0.0) + add.sum(1)
    C = keep[..., None, None] * C.masked_fill(gone[..., None, None], 0.0) + torch.einsum(
        "bjhk,bjhv->bhkv", add, v
    )
    return h, State(C, n, after[:, -1] if cell.exponential else None)


def read_ring(q, ring, used, state: State, options: Options):
    """Computes h [B, H, V] of q [B, H, K], and the state, after the first `used` [B, H] entries of a
    ring (replay.py), as one chunk of R steps."""
    k, v, i, f = (x.transpose(1, 2) for x in ring[:4])
    hold = torch.arange(k.shape[1], device=k.device) >= used[:, :1]  # [B, R]
    log_i, log_f = log_gates(options.cell, i, f, hold)
    k, v = (x.to(state.C.dtype).masked_fill(hold[..., None, None], 0.0) for x in (k, v))
    q = (q.to(state.C.dtype) * q.shape[-1] ** -0.5)[:, None].expand_as(k)
    h, last = chunk(q, k, v, log_i, log_f, None, state, options)
    return h[:, -1], last  # held entries pass the state through


def fold(state: State, ring, used, options: Options) -> None:
    """Writes the state after the first `used` [B, H] entries of the ring over `state`."""
    if not used.numel():
        return
    _, last = read_ring(ring.k[:, :, 0], ring, used, state, options)
    for old, new in zip(state, last):
        if old is not None:
            old.copy_(new)


def replay_step(q, k, v, i, f, state: State, ring, options: Options) -> torch.Tensor:
    """Writes a step into the ring, after folding full ones, and returns its h [B, H, V]."""
    if not ring.used.numel():
        return torch.zeros_like(v)
    size = ring.k.shape[2]
    full = ring.used >= size
    fold(state, ring, torch.where(full, size, 0), options)
    at = ring.used.masked_fill(full, 0).clamp_min(0)
    for entries, new in zip(ring, (k, v, i, f)):
        place = at.long()[(..., *[None] * (entries.dim() - 2))]
        entries.scatter_(2, place.expand(*at.shape, 1, *entries.shape[3:]), new[:, :, None])
    ring.used.copy_(at + 1)
    return read_ring(q, ring, ring.used, state, options)[0]


def epilogue(h, out_gate, norm, norm_weight, norm_eps: float) -> torch.Tensor:
    """Computes sigmoid(out_gate) norm(h) norm_weight for every head: h [..., H, V], weight [H, V]."""
    norm_eps = max(norm_eps, LEAST_EPS)
    if norm == "layer":
        h = layer_norm(h, h.shape[-1:], eps=norm_eps)
    elif norm == "rms":
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm_eps)
    if norm_weight is not None:
        h = h * norm_weight.to(h.dtype)
    return h if out_gate is None else h * torch.sigmoid(out_gate.to(h.dtype))
