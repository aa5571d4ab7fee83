"""Runs a call whose arguments were checked: by the op, or by the reference."""

from typing import List, NamedTuple, Optional, Tuple

import torch

from . import reference
from .all_states import AllStates
from .cells import Cell
from .dispatch import BACKEND, select_backend, without_autocast
from .formulas import CALLS, fall_back, fall_back_for_derivatives, is_recorded, is_transformed
from .padding import pad_call, padded_width
from .sequences import lower_masks, stack_states, state_dtype

State = Tuple[torch.Tensor, ...]


class Options(NamedTuple):
    grad_clip: Optional[float] = None
    clip_state: Optional[float] = None
    tf32: bool = False
    save: str = "gates"
    return_states: bool = False


def run(
    spec: Cell, x, weight, bias, state, masks, options: Options, backend: str
) -> Tuple[torch.Tensor, State, List[torch.Tensor]]:
    """Returns h, the last states, and those of every step but h if they are asked for. `masks` are
    reset, hold, lengths, cu_seqlens."""
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    inputs = cast(x, weight, bias, state)
    chosen = fall_back_for_derivatives(chosen, backend, *inputs, stacklevel=5)
    if chosen == "cuda" and options.clip_state is not None and not _clips(*inputs):
        if backend != "auto":
            raise ValueError(
                f"clip_state is {options.clip_state}, but must be None with backend='cuda' for gradients "
                "in 16 bits: backend='reference' has them"
            )
        chosen = fall_back(
            "the kernel has no gradients of clipped states in 16 bits on CUDA", stacklevel=5
        )
    if chosen == "reference":
        h, last, states = _reference(spec, inputs, masks, options)
        return h, _unstack(spec, last), states
    width, states = x.shape[-1], []
    padded = padded_width(x.device.type, x.dtype, x.shape[1], width)
    if padded != width:
        inputs = pad_call(padded, *inputs)
    clips = options.grad_clip, options.tf32
    if options.return_states and spec.states > 1:
        given = *inputs, *masks, *clips, options.clip_state
        h, last, _, _, *states = AllStates.apply(spec.name, *given)
    else:
        save = options.save == "gates" and is_recorded(*inputs)
        given = *inputs, *masks, *clips, save
        if options.clip_state is not None:
            given = *given, options.clip_state
        h, last, _, _ = CALLS[f"{spec.name}_fwd"](*given)
    if padded != width:
        h, last = h[..., :width].contiguous(), last[..., :width]
        states = [s[..., :width] for s in states]
    return h, _unstack(spec, last), states


def _clips(x, *others) -> bool:
    """Whether the CUDA kernel clips states: not in 16 bits where a gradient may be asked for, because
    it depends on values that would be rounded."""
    if x.dtype == torch.float32 or not torch.is_grad_enabled():
        return True
    return not (is_recorded(x, *others) or is_transformed() or torch.jit.is_tracing())


def cast(x, weight, bias, state):
    """Returns weight in x's dtype (the operand), the stacked states [K, S, N, D] in the state
    dtype, and bias in either."""
    dtype = state_dtype(x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = as_dtype(bias, dtype)
    if state is not None:
        state = stack_states([as_dtype(s, dtype) for s in state])
    return x, as_dtype(weight, x.dtype), bias, state


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Without a call of `to`: it takes time that shows in a step of 30 us on a CPU.
    return x if x.dtype == dtype else x.to(dtype)


def _unstack(spec, last) -> State:
    states = last.unbind(0)
    if spec.detached_states == 0:
        return states
    carried = spec.states - spec.detached_states
    return states[:carried] + tuple(s.detach() for s in states[carried:])


def _reference(spec, inputs, masks, options: Options):
    """Replaces lengths and cu_seqlens by hold, and runs the loop."""
    x, weight, bias, state = inputs
    lowered = lower_masks(x, *masks)
    with without_autocast(x.device.type):  # the loop itself rounds where the kernels do
        h, last, states = reference.sequence(
            spec, lowered.x, weight, bias, state, lowered.reset, lowered.hold, options.grad_clip,
            options.clip_state, options.return_states,
        )  # fmt: skip
    return lowered.unpack(h), last, [lowered.unpack(s) for s in states]
