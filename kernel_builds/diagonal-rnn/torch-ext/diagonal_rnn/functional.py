"""The public functions. Shapes: B batch, T time, D channels, K states, S sequences.

Every cell takes, besides what its docstring says,

    x           [B, T, 3, D]  pre-activations from the input, bf16, fp16, fp32 or fp64; any strides.
                Or [N, B, T, 3, D / N], the channels in N heads, as `headwise_product` leaves them:
                on CUDA and the CPU that costs no copy
    bias        [3, D]        is added to x, or None
    state       K tensors [B, D], None for the empty state (zeros); differentiable
    reset       [B, T] bool   the state is emptied *before* a marked step (document boundaries)
    hold        [B, T] bool   at a marked step the state passes through and h is 0 (padding)
    lengths     [B] int       row b ends after lengths[b] steps: later marks of reset count no more
    cu_seqlens  [S + 1] int   documents packed into one row: x is [1, total, 3, D], states are
                              [S, D], document s is x[0, cu_seqlens[s]:cu_seqlens[s + 1]]
    method      "sequential"  step by step, exact
                "multiple_shooting", "newton"  parallel in time: iterated until the residual is at most `tol` or
                              `max_iters` are done, then finished exactly; CUDA and the reference
                "auto"        whichever is faster for this shape on this device
    tol, max_iters            None for the method's own
    return_states             return a third value, the K states of every step [B, T, D], h first: flash_gru
                              has h alone, c of flash_lstm is in fp32 (fp64) and 0 at held steps.
                              Differentiable. On CUDA and the CPU it is what the forward keeps for the
                              backward, which is rounded to x's dtype
    return_info               one more result, the last: `Info`, what the method did
    backend     "auto"|"cuda"|"cpu"|"reference"  one asked for by name is used or refused

and returns ``(h, state)``: h [B, T, D] in x's dtype and the K last states in fp32 (fp64 for fp64),
unrounded. All arithmetic is in that dtype too, weights included: gradients come back in the dtype
of what they belong to. Wrong arguments raise TypeError or ValueError naming the argument, what it
was and what it must be; a backend that is not here raises RuntimeError.
"""

from typing import Any, NamedTuple, Tuple

import torch

from . import reference
from .arguments import check_method, check_rows, check_sequence, check_x, sizes
from .cells import CELLS
from .checks import check_flag, check_state
from .dispatch import BACKEND, select_backend
from .formulas import CALLS, fall_back_for_derivatives, is_recorded
from .memory import check_memory
from .newton import sequence as parallel_sequence
from .sequences import stack_states, state_dtype

State = Tuple[torch.Tensor, ...]
Result = Tuple[Any, ...]  # (h, state), then states and info if they are asked for
NO_MASKS = (None, None, None, None)


class Info(NamedTuple):
    """What the method did; reading it is the only thing that waits for the device."""

    method: str
    iterations: torch.Tensor  # [] int32
    residual: torch.Tensor  # [] the largest when the parallel part stopped; 0 for "sequential"
    finished: torch.Tensor  # [] int32, number of steps that were run sequentially to finish


def flash_gru(
    x, a, state=None, *, bias=None, reset=None, hold=None, lengths=None, cu_seqlens=None,
    method="auto", tol=None, max_iters=None, return_states=False, return_info=False, backend="auto",
) -> Result:  # fmt: skip
    """Gated recurrent unit with a diagonal recurrence (arXiv 2510.21450): a [3, D].

        z, r = sigmoid(a h + x)           c = tanh(a_c (h r) + x_c)
        h' = (1 - z) h + z c

    Rows z, r, c; states (h,). z opens the update, the opposite of torch's. Arguments and errors:
    see the module.
    """
    spec = CELLS["flash_gru"]
    check_x(spec, x, "B, T", 4)
    masks, weight = (reset, hold, lengths, cu_seqlens), _rows(x, [("a", a, 3)], bias)
    options, returned = (method, tol, max_iters), (return_states, return_info)
    return _sequence(spec, x, weight, state, masks, options, returned, backend)


def flash_lstm(
    x, a, p, state=None, *, bias=None, reset=None, hold=None, lengths=None, cu_seqlens=None,
    method="auto", tol=None, max_iters=None, return_states=False, return_info=False, backend="auto",
) -> Result:  # fmt: skip
    """Long short-term memory with a diagonal recurrence (arXiv 2510.21450): a [3, D], p [2, D].

        f = sigmoid(a_f h + p_f c + x_f)      z = tanh(a_z h + x_z)
        c' = f c + (1 - f) z
        o = sigmoid(a_o h + p_o c' + x_o)     h' = o tanh(c')

    Rows f, o, z; peepholes f, o; states (h, c). Arguments and errors: see the module.
    """
    spec = CELLS["flash_lstm"]
    check_x(spec, x, "B, T", 4)
    masks = reset, hold, lengths, cu_seqlens
    weight = _rows(x, [("a", a, 3), ("p", p, 2)], bias)
    options, returned = (method, tol, max_iters), (return_states, return_info)
    return _sequence(spec, x, weight, state, masks, options, returned, backend)


def flash_gru_step(x, a, state=None, *, bias=None, backend="auto") -> Result:
    """One step of `flash_gru`: x [B, 3, D] or [N, B, 3, D / N] -> h [B, D], (h,)."""
    spec = CELLS["flash_gru"]
    check_x(spec, x, "B", 3)
    x = x.unsqueeze(-3)
    return _step(spec, x, _rows(x, [("a", a, 3)], bias), state, backend)


def flash_lstm_step(x, a, p, state=None, *, bias=None, backend="auto") -> Result:
    """One step of `flash_lstm`: x [B, 3, D] or [N, B, 3, D / N] -> h [B, D], (h, c)."""
    spec = CELLS["flash_lstm"]
    check_x(spec, x, "B", 3)
    x = x.unsqueeze(-3)
    return _step(spec, x, _rows(x, [("a", a, 3), ("p", p, 2)], bias), state, backend)


def _rows(x: torch.Tensor, weights, bias) -> torch.Tensor:
    """Returns the weight [P, D] followed by the rows of a bias, as the engines read them; `weights`
    are name, value and number of rows of its parts."""
    D, dtype = sizes(x)[2], state_dtype(x.dtype)
    given = weights if bias is None else [*weights, ("bias", bias, 3)]
    for name, value, rows in given:
        check_rows(name, value, rows, D, x)
    values = [value for _, value, _ in given]
    check_memory([*(name for name, _, _ in given), ""], *values)
    parts = [value.to(dtype) for value in values]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sequence(spec, x, weight, state, masks, options, returned, backend):
    return_states, return_info = returned
    check_flag("return_states", return_states)
    check_flag("return_info", return_info)
    check_sequence(spec, x, state, *masks)
    check_method(*options)
    given = spec, x, weight, state, masks, options, return_states, backend
    h, last, others, method, report = _run(*given)
    result = (h, last, (h, *others)) if return_states else (h, last)
    if not return_info:
        return result
    done, residual, finished = report.detach().unbind()
    return *result, Info(method, done.to(torch.int32), residual, finished.to(torch.int32))


def _step(spec, x, weight, state, backend) -> Result:
    B, _, D = sizes(x)
    check_state(spec, state, (B, D), "[B, D]", x)
    check_memory(("state",), *(state or ()))
    options = "sequential", None, None
    h, last, *_ = _run(spec, x, weight, state, NO_MASKS, options, False, backend)
    return h.squeeze(1), last


def _run(spec, x, weight, state, masks, options, return_states, backend):
    """Chooses backend and method, and runs the op; masks are reset, hold, lengths, cu_seqlens. Returns
    h, the last states, those of every step but h if they are asked for, the method and its report."""
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    chosen = fall_back_for_derivatives(chosen, backend, x, weight, *(state or ()), stacklevel=5)
    requested, tol, max_iters = options
    cu_seqlens, (B, T, D) = masks[-1], sizes(x)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    method = select_method(requested, chosen, sequences * D * x.element_size() // 4, T)
    tol, max_iters = -1.0 if tol is None else tol, -1 if max_iters is None else max_iters
    if state is not None:
        state = stack_states([s.to(weight.dtype) for s in state])
    if chosen == "reference":
        given = (method, tol, max_iters), return_states
        h, last, others, report = _reference(spec, x, weight, state, masks, *given)
    else:
        asked = return_states and spec.states > 1
        save = asked or is_recorded(x, weight, state)
        fwd, others = CALLS[f"{spec.name}_fwd"], []
        h, last, saved, report = fwd(x, weight, state, *masks, method, tol, max_iters, save)
        if asked:
            others = [s.to(weight.dtype) for s in saved.unbind(2)[: spec.states - 1]]
            if masks[1] is not None:  # a held step keeps what passes through it
                others = [s.masked_fill(masks[1][..., None], 0.0) for s in others]
    return h, last.unbind(0), others, method, report


# On an H200 "sequential" takes 70 ns a step however few channels there are, and "multiple_shooting"
# at least 12 us. From 16,384 threads on (each with one fp32 or two 16-bit channels) "sequential" is
# bound by memory as well: flash_gru fp32, 1x4096: 8,192 channels take 0.284 ms sequentially and
# 0.154 by multiple shooting, 32,768 channels 0.589 and 0.596.
PARALLEL_STEPS, PARALLEL_WORDS = 256, 16384


def select_method(requested: str, backend: str, words: int, steps: int) -> str:
    """Returns the method to run: a pure function of static facts."""
    if requested == "auto":
        parallel = backend == "cuda" and steps >= PARALLEL_STEPS and words < PARALLEL_WORDS
        return "multiple_shooting" if parallel else "sequential"
    if requested != "sequential" and backend == "cpu":
        raise ValueError(
            f"method is {requested!r}, but on the CPU it must be 'sequential' or 'auto': the methods that "
            "are parallel in time run on CUDA, and with backend='reference'"
        )
    return requested


def _reference(spec, x, weight, state, masks, options, return_states):
    """Computes h, last, the other states of every step and [iterations, residual, finished]."""
    dtype = x.dtype
    lowered, weight = reference.lower(spec, x, weight, masks)
    given = spec, lowered.x, weight, state, lowered.reset, lowered.hold
    if options[0] == "sequential":
        h, last, others = reference.sequence(*given, return_states)
        report = torch.zeros(3, device=x.device)
    else:
        h, last, others, report = parallel_sequence(*given, *options)
    return lowered.unpack(h).to(dtype), last, [lowered.unpack(s) for s in others], report
