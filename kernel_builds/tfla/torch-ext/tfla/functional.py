"""The public functions. Shapes: B batch, T time, H heads, K width of a key, V width of a value.

    q, k        [B, T, H, K]   queries and keys, bf16, fp16, fp32 or fp64; any strides; q is scaled
                               by K^-1/2 inside; K and V are multiples of 8 up to 1024
    v           [B, T, H, V]   values; k, v and out_gate are cast to q's dtype
    i, f        [B, T, H]      pre-activations of the input and forget gate, any floating dtype
    state       (C [B, H, K, V], n [B, H, K], m [B, H]) for the exponential gate, (C,) for the
                sigmoid one, (C, n) for the sigmoid one with normalize="floor"; None for the empty
                state, which is zeros; differentiable, but for m
    reset       [B, T] bool    the state is emptied *before* a marked step (document boundaries)
    hold        [B, T] bool    at a marked step the state passes through and h is 0 (padding)
    lengths     [B] int        row b ends after lengths[b] steps: later marks of reset count no more
    cu_seqlens  [S + 1] int    documents packed into one row: q is [1, total, H, K], states have S
                               rows, document s is q[0, cu_seqlens[s]:cu_seqlens[s + 1]]
    chunk_size  int            steps whose products are taken together; changes roundings, and
                               speed; None for the backend's own
    eps         float          added to the divisor in the stabilised scale (xLSTM-7B: 1e-6)
    normalize   None|"floor"   "floor" divides the sigmoid gate's h by max(|n q|, 1) + eps as well
    normalizer_grad            False leaves the gradient through the divisor out, as published
    out_gate    [B, T, H, V]   pre-activations: h is multiplied by their sigmoid, after the norm
    norm        None|"layer"|"rms"  of every head's h on its own: h over the root of its mean square
                               plus norm_eps, "layer" takes its mean away first; times norm_weight
                               [H, V], any floating dtype, None for 1
    backend     "auto"|"cuda"|"cpu"|"reference"  one asked for by name is used or refused

States and sums are in fp32 (fp64 for fp64), and the returned state is unrounded. In fp16 on CUDA a
state between chunks must stay below 65504: it is an fp16 operand there. Wrong arguments
raise TypeError or ValueError naming the argument, what it was and what it must be; a backend that is
not here raises RuntimeError.
"""

from typing import Optional, Tuple

import torch

from . import reference
from .arguments import (
    STORED,
    check_chunk_size,
    check_epilogue,
    check_gate,
    check_inputs,
    check_query,
    check_sequences,
    check_state,
)
from .cells import Cell, pick_cell
from .checks import (
    STATE,
    check_flag,
    check_no_gradient,
    check_values,
)
from .cost_model import DEVICES, best_chunk
from .dispatch import BACKEND, ops, select_backend, without_autocast
from .formulas import CALLS, fall_back_for_derivatives, has_tangent, is_recorded
from .memory import check_apart, check_memory, check_written
from .reference import LEAST_EPS, Options
from .sequences import lower_masks, state_dtype

State = Tuple[torch.Tensor, ...]
Result = Tuple[torch.Tensor, State]


def default_chunk(cell: Cell, K: int, V: int, dtype: torch.dtype, device_type: str) -> int:
    """Returns the number of steps of a chunk if none is given: NOTEBOOK.md, "Chunk size", has the
    measurements.

    On CUDA in 16 bits it is 64 for heads of up to 64, whose states stay in registers; for others 128 or
    256, whichever is nearer to the cost model's optimum on an H200 with states in 16 bits; fp32 has
    room for 128 in shared memory. A GPU with less shared memory takes the longest chunk that fits.
    """
    if device_type != "cuda":
        return 128 if dtype.itemsize == 2 else 64
    if dtype.itemsize != 2:
        return 128
    if max(K, V) <= 64:
        return 64
    best = best_chunk(cell, K, V, DEVICES["H200"].intensity, state=2)
    return 128 if best * best < 128 * 256 else 256


def kept_chunks(k, lengths, cu_seqlens, size: int) -> int:
    """Returns how many chunks' states the forward keeps, so that the backward need not recompute
    them: all on Hopper in 16 bits, where a chunk has up to 256 steps in tiles of 64; none
    elsewhere."""
    if k.device.type != "cuda" or k.dtype.itemsize != 2:
        return 0
    if torch.cuda.get_device_properties(k.device).major != 9:
        return 0
    B, T = k.shape[:2]
    steps = max(64, (min(size, T, 256) + 63) // 64 * 64)
    if lengths is None and cu_seqlens is None:
        return B * ((T + steps - 1) // steps)
    return B * T // steps + (B if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def mlstm(
    q, k, v, i, f, state=None, *, input_gate="exp", reset=None, hold=None, lengths=None,
    cu_seqlens=None, chunk_size=None, eps=0.0, normalize=None, normalizer_grad=True, out_gate=None,
    norm=None, norm_weight=None, norm_eps=1e-6, backend="auto",
) -> Result:  # fmt: skip
    """mLSTM (xLSTM, arXiv 2405.04517) in chunks (arXiv 2503.14376) -> h [B, T, H, V], state.

        m' = max(lf + m, i)        C' = e^(lf + m - m') C + e^(i - m') k v^T     n' likewise of k
        h' = C'^T q / (max(|n' q|, e^-m') + eps)                          lf = logsigmoid(f)
        y = sigmoid(out_gate) norm(h') norm_weight                what is returned, where asked for

    input_gate="sigmoid": C' = sigmoid(f) C + sigmoid(i) k v^T, h' = C'^T q, no n and no m. The
    gradient is exact, also through the divisor, unless normalizer_grad says otherwise; m carries
    none, and the gradients of C and n are taken at fixed m. Arguments and errors: see the module.
    """
    check_inputs(k, v, i, f, "B, T", 4)
    check_query(q, k, "B, T")
    check_gate(input_gate, normalize, eps)
    check_chunk_size(chunk_size)
    check_flag("normalizer_grad", normalizer_grad)
    check_epilogue(v, out_gate, norm, norm_weight, norm_eps)
    cell = pick_cell(input_gate, normalize)
    sequences, letter = check_sequences(k, reset, hold, lengths, cu_seqlens)
    check_state(cell, state, sequences, letter, k, v)
    check_memory(STORED, q, k, v, i, f, out_gate, norm_weight, *(state or ()))
    check_values(k, lengths, cu_seqlens)
    if out_gate is not None:  # its values at held steps must not matter
        out_gate = lower_masks(out_gate, None, hold, lengths, None).x
    chosen = select_backend(backend, k.device.type, BACKEND, q.dtype)
    given = q, k, v, i, f, *(state or ()), out_gate, norm_weight
    chosen = fall_back_for_derivatives(chosen, backend, *given, stacklevel=3)
    options = Options(cell, float(eps), normalizer_grad)
    masks = (reset, hold, lengths, cu_seqlens)
    h, last = run(chosen, q, k, v, i, f, state, masks, options, chunk_size)
    return finish(chosen, h, q.dtype, out_gate, norm, norm_weight, norm_eps), last


def mlstm_step(
    q, k, v, i, f, state=None, *, input_gate="exp", eps=0.0, normalize=None, out_gate=None,
    norm=None, norm_weight=None, norm_eps=1e-6, inplace=False, backend="auto",
) -> Result:  # fmt: skip
    """One step of `mlstm`: q, k [B, H, K], v [B, H, V], i, f [B, H] -> h [B, H, V], state.

    inplace=True writes the next state over the given one, which must be contiguous, in the state
    dtype, and free of gradients, and returns the same tensors.
    """
    check_inputs(k, v, i, f, "B", 3)
    check_query(q, k, "B")
    check_gate(input_gate, normalize, eps)
    check_epilogue(v, out_gate, norm, norm_weight, norm_eps)
    cell = pick_cell(input_gate, normalize)
    check_state(cell, state, k.shape[0], "B", k, v)
    check_flag("inplace", inplace)
    options = Options(cell, float(eps), True)
    if inplace:
        check_inplace(q, k, v, i, f, state, out_gate, norm_weight)
    else:
        check_memory(STORED, q, k, v, i, f, out_gate, norm_weight, *(state or ()))
    chosen = select_backend(backend, k.device.type, BACKEND, q.dtype)
    given = q, k, v, i, f, *(state or ()), out_gate, norm_weight
    chosen = fall_back_for_derivatives(chosen, backend, *given, stacklevel=3)
    epilogue = (out_gate, norm, norm_weight, norm_eps)
    if chosen != "reference" and not _wants_grad(
        q, k, v, i, f, *(state or ()), out_gate, norm_weight
    ):
        return _run_step(q, k, v, i, f, state, options, epilogue, inplace)
    q, k, v, i, f = (t.unsqueeze(1) for t in (q, k, v, i, f))
    h, last = run(chosen, q, k, v, i, f, state, (None,) * 4, options, 1)
    if out_gate is not None:
        out_gate = out_gate.unsqueeze(1)
    h = finish(chosen, h, q.dtype, out_gate, norm, norm_weight, norm_eps).squeeze(1)
    if inplace:
        for old, new in zip(state, last):
            old.copy_(new)
        last = tuple(state)
    return h, last


def run(chosen: str, q, k, v, i, f, state, masks, options: Options, chunk_size) -> Result:
    """Runs the op on checked arguments; masks are reset, hold, lengths, cu_seqlens. With q
    None only the state is computed. With the reference, h is not rounded yet."""
    q, k, v, i, f, carried = cast(options.cell, q, k, v, i, f, state)
    size = chunk_size or default_chunk(options.cell, k.shape[3], v.shape[3], k.dtype, k.device.type)
    if chosen == "reference":
        with without_autocast(k.device.type):  # its sums are in the states' dtype
            h, last = reference.run_chunks(q, k, v, i, f, carried, masks, options, size)
        return h, pack(last)
    C, n, m = (None, None, None) if carried is None else carried
    exponential, normalized = options.cell.exponential, options.cell.normalized
    trains = q is not None and is_recorded(q, k, v, i, f, C, n)
    h, C, n, m, *_ = CALLS["mlstm_fwd"](
        q, k, v, i, f, C, n, m, *masks, exponential, normalized, options.eps,
        options.normalizer_grad, size, kept_chunks(k, masks[2], masks[3], size) if trains else 0,
    )  # fmt: skip
    n, m = n if normalized else None, m if exponential else None
    return h, pack(reference.State(C, n, m))


def _run_step(q, k, v, i, f, state, options: Options, epilogue, inplace: bool) -> Result:
    cell = options.cell
    q, k, v, i, f, carried = cast(cell, q, k, v, i, f, state)
    C, n, m = (None, None, None) if carried is None else carried
    out_gate, weight, *norm = lower_epilogue(q.dtype, *epilogue, as_it_is=BACKEND == "cuda")
    tensors = (q, k, v, i, f, C, n, m, out_gate, weight)
    rest = (cell.exponential, cell.normalized, options.eps, *norm)
    if inplace:
        return ops.mlstm_step_(*tensors, *rest), tuple(state)
    h, C, n, m = ops.mlstm_step(*tensors, *rest)
    n, m = n if cell.normalized else None, m if cell.exponential else None
    return h, pack(reference.State(C, n, m))


def cast(cell: Cell, q, k, v, i, f, state):
    """Casts operands to q's dtype, and gates and states to the state dtype."""
    io = k.dtype if q is None else q.dtype
    dtype = state_dtype(io)
    if state is not None:
        C, *others = [_as(s, dtype) for s in state]
        n = others[0] if cell.normalized else None
        m = others[-1] if cell.exponential else None
        state = reference.State(C, n, m.detach() if m is not None and m.requires_grad else m)
    return q, _as(k, io), _as(v, io), _as(i, dtype), _as(f, dtype), state


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Saves a function call, which would show in a step of 20 us on a CPU.
    return x if x.dtype == dtype else x.to(dtype)


def pack(state: reference.State) -> State:
    """Returns the states that a cell has, with m detached."""
    m = None if state.m is None else state.m.detach()
    return tuple(s for s in (state.C, state.n, m) if s is not None)


def finish(chosen: str, h, dtype: torch.dtype, out_gate, norm, norm_weight, norm_eps):
    """Applies the epilogue to h [B, T, H, V] and rounds to `dtype`. The reference's h is not
    rounded before."""
    if norm is None and out_gate is None:
        return h.to(dtype)
    if chosen != "reference":
        given = lower_epilogue(dtype, out_gate, norm, norm_weight, norm_eps)
        return CALLS["mlstm_epilogue"](h, *given)
    return reference.epilogue(h, out_gate, norm, norm_weight, norm_eps).to(dtype)


def lower_epilogue(
    dtype: torch.dtype, out_gate, norm, norm_weight, norm_eps, *, as_it_is: bool = False
):  # fmt: skip
    """Returns the epilogue's arguments as the ops take them. A step on CUDA also takes a weight in
    h's dtype, because a cast would be another launch per token."""
    out_gate = None if out_gate is None else out_gate.to(dtype)
    weight = norm_weight
    if weight is not None and not (as_it_is and weight.dtype == dtype):
        weight = weight.to(state_dtype(dtype))
    return out_gate, weight, norm is not None, norm == "layer", max(float(norm_eps), LEAST_EPS)


def _wants_grad(*tensors: Optional[torch.Tensor]) -> bool:
    if torch.jit.is_tracing():  # what is traced without gradients may be run with them
        return True
    given = [t for t in tensors if t is not None]
    return (torch.is_grad_enabled() and any(t.requires_grad for t in given)) or any(
        map(has_tangent, given)
    )


def check_inplace(
    q, k, v, i, f, state, out_gate, norm_weight, *, who="inplace=True", dtype=None
) -> None:  # fmt: skip
    """Checks a state that a step overwrites; `dtype` is q's where there is no q."""
    if state is None:
        raise ValueError(f"state is None, but {who} needs the state to write into")
    check_no_gradient(who, STORED, q, k, v, i, f, out_gate, norm_weight, *state)
    dtype = state_dtype(q.dtype if dtype is None else dtype)
    for s, value in enumerate(state):
        check_written(STATE[s], value)
        if value.dtype != dtype or not value.is_contiguous():
            had = value.dtype if value.dtype != dtype else "strided"
            raise ValueError(f"state[{s}] is {had}, but must be {dtype} and contiguous for {who}")
    check_apart(STORED, len(state), q, k, v, i, f, out_gate, norm_weight, *state)
