"""Registers fake implementations and gradients of the ops.

The forward keeps its inputs, the last state, what divides h (h itself and `total`, one number
for every row of a head), and, if `kept` counts them, the states before its chunks; otherwise the
backward recomputes those. The epilogue keeps the same h and its own inputs. mlstm_step_ and
mlstm_replay_ are for decoding and have no gradient.
"""

import torch

from ._ops import BACKEND
from .cells import find_cell
from .formulas import (
    CALLS,
    gradients_by,
    is_differentiated_again,
    refuse_second_derivative,
    register,
    register_fake,
)
from .reference import Options, State, epilogue, run_chunks
from .sequences import state_dtype


def _states(k, v, cu_seqlens, exponential, normalized):
    """Returns empty C, n, m; k is [B, T, H, K] or [B, H, K]."""
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, K, V = k.shape[-2], k.shape[-1], v.shape[-1]
    dtype = state_dtype(k.dtype)
    return (
        k.new_empty(S, H, K, V, dtype=dtype),
        k.new_empty((S, H, K) if normalized else (0,), dtype=dtype),
        k.new_empty((S, H) if exponential else (0,), dtype=dtype),
    )


@register_fake("mlstm_fwd")
def _(
    q, k, v, i, f, C, n, m, reset, hold, lengths, cu_seqlens, exponential, normalized, eps,
    normalizer_grad, chunk_size, kept=0,
):  # fmt: skip
    h = k.new_empty(v.shape if q is not None else (0,))
    total = i.new_empty(i.shape if normalized and q is not None else (0,))
    H, K, V = k.shape[-2], k.shape[-1], v.shape[-1]
    kept_C = k.new_empty((H, kept, K, V) if kept else (0,))
    kept_n = i.new_empty((H, kept, K) if kept and normalized else (0,))
    return (h, *_states(k, v, cu_seqlens, exponential, normalized), total, kept_C, kept_n)


@register_fake("mlstm_bwd")
def _(
    dh, dC, dn, last_C, last_n, h, total, kept_C, kept_n, q, k, v, i, f, C, n, m, reset, hold, lengths, cu_seqlens,
    exponential, normalized, eps, normalizer_grad, chunk_size,
):  # fmt: skip
    dq = k.new_empty(k.shape if q is not None else (0,))
    gate = i.new_empty(i.shape)
    first_C, first_n, _ = _states(k, v, cu_seqlens, exponential, normalized)
    return (
        dq,
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        gate,
        torch.empty_like(gate),
        first_C,
        first_n,
    )


def _setup_context(ctx, inputs, output):
    tensors, ctx.options, kept = inputs[:12], inputs[12:17], inputs[17]
    _, normalized, _, normalizer_grad, _ = ctx.options
    h, last_C, last_n, _, total, kept_C, kept_n = output
    kept_C, kept_n = kept_C if kept else None, kept_n if kept and normalized else None
    ctx.set_materialize_grads(False)
    through_divisor = normalized and normalizer_grad and tensors[0] is not None
    of_h = h if through_divisor else None
    ctx.save_for_backward(*tensors, last_C, last_n, of_h, total, kept_C, kept_n)


def _backward(ctx, dh, dC, dn, *_):
    *tensors, last_C, last_n, h, total, kept_C, kept_n = ctx.saved_tensors
    if tensors[0] is None:  # only the state was wanted, and h is empty
        dh = None
    if is_differentiated_again():
        exponential, normalized, eps, normalizer_grad, size = ctx.options
        options = Options(find_cell(exponential, normalized), eps, normalizer_grad)

        def run(q, k, v, i, f, C, n):
            state = None if C is None else State(C, n, tensors[7])
            h, last = run_chunks(q, k, v, i, f, state, tensors[8:12], options, size)
            return h.to(k.dtype), last.C, last.n

        return *gradients_by(run, tensors[:7], (dh, dC, dn)), *(None,) * 11
    of_forward = (last_C, last_n, h, total, kept_C, kept_n)
    grads = CALLS["mlstm_bwd"](dh, dC, dn, *of_forward, *tensors, *ctx.options)
    wanted = ctx.needs_input_grad[:7]
    given = [g if want else None for g, want in zip(grads, wanted)]
    return *given, *(None,) * 11


register("mlstm_fwd", _backward, _setup_context)


@register_fake("mlstm_step")
def _(
    q, k, v, i, f, C, n, m, out_gate, norm_weight, exponential, normalized, eps, norm, centered,
    norm_eps,
):  # fmt: skip
    return (k.new_empty(v.shape), *_states(k, v, None, exponential, normalized))


@register_fake("mlstm_step_")
def _(
    q, k, v, i, f, C, n, m, out_gate, norm_weight, exponential, normalized, eps, norm, centered,
    norm_eps,
):  # fmt: skip
    return k.new_empty(v.shape)


@register_fake("linear_step")
def _(x, weights, scales, biases, capped, cap, norm, eps, residual, gated):
    rows = [w.shape[0] for w in weights]
    plain = len(rows) - capped
    out = rows[0] if gated else sum(rows[:plain])
    bounded = x.new_empty(x.shape[0], sum(rows[plain:]), dtype=state_dtype(x.dtype))
    return x.new_empty(x.shape[0], out), bounded


if BACKEND == "cuda":

    @register_fake("norm_step")
    def _fake_norm_step(x, norm, eps, weights, biases, cap):
        width = sum(w.shape[0] for w in weights)
        return x.new_empty(x.shape), x.new_empty(x.shape[0], width, dtype=torch.float32)

    @register_fake("gate_step")
    def _fake_gate_step(gate, up):
        return gate.new_empty(gate.shape)

    @register_fake("mlstm_replay_")
    def _fake_replay(q, k, v, i, f, C, n, m, ring_k, *_):
        return ring_k.new_empty(v.shape if q is not None else (0,))


@register_fake("mlstm_epilogue")
def _(h, out_gate, norm_weight, norm, centered, norm_eps):
    return h.new_empty(h.shape)


@register_fake("mlstm_epilogue_bwd")
def _(dy, h, out_gate, norm_weight, norm, centered, norm_eps):
    shape = lambda given: (0,) if given is None else given.shape
    dweight = h.new_empty(shape(norm_weight), dtype=state_dtype(h.dtype))
    return h.new_empty(h.shape), h.new_empty(shape(out_gate)), dweight


def _setup_epilogue(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])  # h before the norm; results of the norm are not kept
    ctx.options = inputs[3:]


def _backward_epilogue(ctx, dy):
    if is_differentiated_again():
        norm, centered, eps = ctx.options
        name = ("layer" if centered else "rms") if norm else None
        run = lambda h, gate, weight: (
            epilogue(h.to(state_dtype(h.dtype)), gate, name, weight, eps),
        )
        return *gradients_by(run, ctx.saved_tensors, (dy,)), None, None, None
    grads = CALLS["mlstm_epilogue_bwd"](dy, *ctx.saved_tensors, *ctx.options)
    given = [g if want else None for g, want in zip(grads, ctx.needs_input_grad)]
    return *given, None, None, None


register("mlstm_epilogue", _backward_epilogue, _setup_epilogue)
refuse_second_derivative("tfla", "mlstm_bwd")
refuse_second_derivative("tfla", "mlstm_epilogue_bwd")
