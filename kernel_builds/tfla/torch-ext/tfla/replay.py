"""Decoding that reads C in every step and writes it once in R: the last steps of each row wait in a
ring, and a step replays them (as ReplaySSM does for Mamba: dao-lab.ai/blog/2026/replayssm).

C is most of what a step moves with many rows, so a step moves little more than half the bytes. With
C, n, m the state before the ring's j entries, b = cumsum(lf) from the first of them, and the new step
as the last one, t:

    m_t = max(b_t + m, max_j (b_t - b_j + li_j))                    0 for the sigmoid gate
    w_j = e^(b_t - b_j + li_j - m_t)        w = e^(b_t + m - m_t)
    h   = (w C^T q + sum_j w_j (q k_j) v_j) / (max(|w n q + sum_j w_j q k_j|, e^-m_t) + eps)
    fold: C' = w C + sum_j w_j k_j v_j^T     n' = w n + sum_j w_j k_j     m' = m_t

These are the steps' own equations, summed in another order. Nothing but the new entry is written
until a step finds the ring full: it folds the entries into the state first. So the last steps can be
taken back: subtract their number from `used`.
"""

from typing import NamedTuple, Tuple

import torch

from . import reference
from .arguments import (
    STORED,
    check_epilogue,
    check_gate,
    check_inputs,
    check_key,
    check_query,
    check_state,
)
from .cells import Cell, pick_cell
from .checks import (
    check_count,
    check_floating,
    check_input,
    check_no_gradient,
    check_tensor,
    check_whole,
)
from .dispatch import BACKEND, ops, select_backend, without_autocast
from .functional import State, cast, check_inplace, finish, lower_epilogue
from .memory import check_apart, check_memory, check_written
from .reference import Options
from .sequences import state_dtype

MOST_STEPS = 16  # of a ring


class Ring(NamedTuple):
    """The last steps of each row, which its state does not hold yet; all contiguous."""

    k: torch.Tensor  # [B, H, R, K], q's dtype
    v: torch.Tensor  # [B, H, R, V], q's dtype
    i: torch.Tensor  # [B, H, R], the state dtype
    f: torch.Tensor  # [B, H, R]
    # [B, H] int32: how many entries hold steps, the same for all heads of a row; bounded to 0..R
    used: torch.Tensor


def mlstm_ring(C, dtype, steps=MOST_STEPS) -> Ring:
    """Returns an empty ring of R = `steps`, 1 to 16, beside the state C [B, H, K, V], for q, k and
    v of this dtype."""
    check_input("C", C)
    if C.dim() != 4:
        raise ValueError(f"C has shape {list(C.shape)}, but must be [B, H, K, V]")
    check_whole("steps", steps, 1, f"an int, 1 to {MOST_STEPS}")
    if steps > MOST_STEPS:
        raise ValueError(f"steps is {steps}, but must be an int, 1 to {MOST_STEPS}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a {type(dtype).__name__}, but must be a torch.dtype")
    check_floating("dtype", C.new_empty(0, dtype=dtype))
    B, H, K, V = C.shape
    new = lambda dtype, *shape: C.new_zeros(B, H, *shape, dtype=dtype)
    i, f = (new(state_dtype(dtype), steps) for _ in range(2))
    return Ring(new(dtype, steps, K), new(dtype, steps, V), i, f, new(torch.int32))


def mlstm_replay_step(
    q, k, v, i, f, state, ring, *, input_gate="exp", eps=0.0, normalize=None, out_gate=None,
    norm=None, norm_weight=None, norm_eps=1e-6, backend="auto",
) -> torch.Tensor:  # fmt: skip
    """One step of `mlstm` from `state` and the steps in `ring`: q, k [B, H, K], v [B, H, V], i, f
    [B, H] -> h [B, H, V].

    Writes the step into the ring; a row whose ring is full first folds it into the state, in place.
    All else is as in `mlstm_step`. There are kernels for CUDA; elsewhere it is PyTorch code, and
    slower than `mlstm_step`.
    """
    check_inputs(k, v, i, f, "B", 3)
    check_query(q, k, "B")
    check_gate(input_gate, normalize, eps)
    check_epilogue(v, out_gate, norm, norm_weight, norm_eps)
    cell = pick_cell(input_gate, normalize)
    check_state(cell, state, k.shape[0], "B", k, v)
    check_inplace(q, k, v, i, f, state, out_gate, norm_weight, who="mlstm_replay_step")
    _check_ring("mlstm_replay_step", ring, state, q.dtype, (q, k, v, i, f, out_gate, norm_weight))
    options, ring = Options(cell, float(eps), True), Ring(*ring)
    given = (out_gate, norm, norm_weight, norm_eps)
    q, k, v, i, f, carried = cast(cell, q, k, v, i, f, state)
    if _select(backend, q) == "reference":
        with without_autocast(q.device.type):
            h = reference.replay_step(q, k, v, i, f, carried, ring, options)
            gate = None if out_gate is None else out_gate[:, None]
            return finish("reference", h[:, None], q.dtype, gate, *given[1:])[:, 0]
    out_gate, weight, *epilogue = lower_epilogue(q.dtype, *given, as_it_is=BACKEND == "cuda")
    rest = (cell.exponential, cell.normalized, options.eps, *epilogue)
    return ops.mlstm_replay_(q, k, v, i, f, *carried, *ring, out_gate, weight, *rest)


def mlstm_fold(state, ring, *, input_gate="exp", normalize=None, backend="auto") -> State:
    """Folds the ring into the state, in place, and empties it; returns the same state tensors.

    `state` and `ring` may be rows of larger ones, such as C[3:5]."""
    check_gate(input_gate, normalize, 0.0)
    cell = pick_cell(input_gate, normalize)
    check_count("ring", ring, 5, "a ring")
    ring = Ring(*ring)
    check_key("ring[0]", ring.k, "[B, H, R, K]", 4)
    check_key("ring[1]", ring.v, "[B, H, R, V]", 4)
    if not (ring.k.shape[2] and ring.v.shape[2]):
        raise ValueError(f"ring[0] has shape {list(ring.k.shape)}, but must have entries")
    check_memory(("ring[0]", "ring[1]"), ring.k, ring.v)  # a part of freed memory cannot be taken
    entry = (ring.k[:, :, 0], ring.v[:, :, 0])
    check_state(cell, state, ring.k.shape[0], "B", *entry)
    check_inplace(*(None,) * 5, state, None, None, who="mlstm_fold", dtype=ring.k.dtype)
    _check_ring("mlstm_fold", ring, state, ring.k.dtype, ())
    carried = as_state(cell, state)
    if _select(backend, ring.k) == "reference":
        with without_autocast(ring.k.device.type):
            reference.fold(carried, ring, ring.used, Options(cell))
        ring.used.zero_()
    else:
        rest = (None, None, cell.exponential, cell.normalized, 0.0, False, False, 0.0)
        ops.mlstm_replay_(*(None,) * 5, *carried, *ring, *rest)
    return tuple(state)


def as_state(cell: Cell, state) -> reference.State:
    n = state[1] if cell.normalized else None
    return reference.State(state[0], n, state[-1] if cell.exponential else None)


def _select(backend: str, q: torch.Tensor) -> str:
    binary = BACKEND if hasattr(ops, "mlstm_replay_") else None
    return select_backend(backend, q.device.type, binary, q.dtype)


def _check_ring(
    who: str, ring, state: Tuple[torch.Tensor, ...], dtype: torch.dtype, others
) -> None:
    """Checks the ring of a state that was checked; it shares no memory with any tensor of the
    call."""
    check_count("ring", ring, 5, "a ring")
    check_tensor("ring[0]", ring[0], state[0].device)
    B, H, K, V = state[0].shape
    R = ring[0].shape[2] if ring[0].dim() == 4 else 0
    if not 1 <= R <= MOST_STEPS:
        had = list(ring[0].shape)
        raise ValueError(f"ring[0] has shape {had}, but must be [B, H, R, K], R 1 to {MOST_STEPS}")
    wide = state_dtype(dtype)
    wanted = (
        (dtype, (B, H, R, K), "[B, H, R, K]"), (dtype, (B, H, R, V), "[B, H, R, V]"),
        (wide, (B, H, R), "[B, H, R]"), (wide, (B, H, R), "[B, H, R]"),
        (torch.int32, (B, H), "[B, H]"),
    )  # fmt: skip
    for at, (value, (kind, shape, letters)) in enumerate(zip(ring, wanted)):
        name = f"ring[{at}]"
        check_tensor(name, value, state[0].device)
        if value.shape != shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)}, but must be {letters} = {list(shape)}"
            )
        if value.dtype != kind:
            raise TypeError(f"{name} has dtype {value.dtype}, but must be {kind}")
        if not check_written(name, value) and not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}, but must be contiguous")
    check_no_gradient(who, ("ring",), *ring)
    names = (*STORED[: len(others)], *(f"state[{s}]" for s in range(len(state))), "ring")
    check_apart(names, 5, *others, *state, *ring)
