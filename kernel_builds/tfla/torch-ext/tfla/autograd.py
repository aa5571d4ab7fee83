"""Fake implementations and gradients of the ops.

The backward computes the chunks' states again, so the forward keeps its inputs and the last state
alone. mlstm_step_ is for decoding and has no gradient.
"""

import torch

from ._ops import add_op_namespace_prefix, ops
from .reference import state_dtype


def _states(k, v, cu_seqlens, exponential, normalized):
    """Empty C, n, m; k is [B, T, H, K], or [B, H, K]."""
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, K, V = k.shape[-2], k.shape[-1], v.shape[-1]
    dtype = state_dtype(k.dtype)
    return (
        k.new_empty(S, H, K, V, dtype=dtype),
        k.new_empty((S, H, K) if normalized else (0,), dtype=dtype),
        k.new_empty((S, H) if exponential else (0,), dtype=dtype),
    )


@torch.library.register_fake(add_op_namespace_prefix("mlstm_fwd"))
def _(
    q, k, v, i, f, C, n, m, reset, hold, lengths, cu_seqlens, exponential, normalized, eps,
    normalizer_grad, chunk_size,
):  # fmt: skip
    h = k.new_empty(v.shape if q is not None else (0,))
    return (h, *_states(k, v, cu_seqlens, exponential, normalized))


@torch.library.register_fake(add_op_namespace_prefix("mlstm_bwd"))
def _(
    dh, dC, dn, last_C, last_n, q, k, v, i, f, C, n, m, reset, hold, lengths, cu_seqlens,
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
    tensors, ctx.options = inputs[:12], inputs[12:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1], output[2])


def _backward(ctx, dh, dC, dn, _dm):
    *tensors, last_C, last_n = ctx.saved_tensors
    if tensors[0] is None:  # only the state was asked for, and h is empty
        dh = None
    grads = ops.mlstm_bwd(dh, dC, dn, last_C, last_n, *tensors, *ctx.options)
    wanted = ctx.needs_input_grad[:7]
    given = [g if want else None for g, want in zip(grads, wanted)]
    return *given, *(None,) * 10


torch.library.register_autograd(
    add_op_namespace_prefix("mlstm_fwd"), _backward, setup_context=_setup_context
)


@torch.library.register_fake(add_op_namespace_prefix("mlstm_step"))
def _(q, k, v, i, f, C, n, m, exponential, normalized, eps):
    return (k.new_empty(v.shape), *_states(k, v, None, exponential, normalized))


@torch.library.register_fake(add_op_namespace_prefix("mlstm_step_"))
def _(q, k, v, i, f, C, n, m, exponential, normalized, eps):
    return k.new_empty(v.shape)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "tfla has no second derivatives in its kernels: pass backend='reference', "
        "which autograd differentiates any number of times"
    )


torch.library.register_autograd(add_op_namespace_prefix("mlstm_bwd"), _no_second_derivative)
