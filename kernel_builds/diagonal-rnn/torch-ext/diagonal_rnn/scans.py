"""The public scans: linear recurrences of numbers and of small blocks. functional.py defines the
shapes."""

import torch

from . import reference
from .arguments import check_scan
from .dispatch import BACKEND, select_backend
from .formulas import CALLS, fall_back_for_derivatives
from .sequences import state_dtype


def linear_scan(a, b, h0=None, *, reverse=False, backend="auto") -> torch.Tensor:
    """Computes h_t = a_t h_{t-1} + b_t, or with `reverse` h_t = a_t h_{t+1} + b_t, elementwise.

    a, b [B, T, D], h0 [B, D] or None for zeros -> h [B, T, D] in b's dtype. The sum is in fp32 (fp64
    for fp64); with a and b in two dtypes both are read in the wider one.
    """
    check_scan(a, b, h0, reverse, block=False)
    return _scan("scan_fwd", a, b, h0, reverse, backend)


def block_scan(a, b, h0=None, *, reverse=False, backend="auto") -> torch.Tensor:
    """`linear_scan` of n x n blocks: a [B, T, D, n, n], b [B, T, D, n], h0 [B, D, n], n <= 4."""
    check_scan(a, b, h0, reverse, block=True)
    return _scan("block_scan_fwd", a, b, h0, reverse, backend)


def _scan(op, a, b, h0, reverse, backend) -> torch.Tensor:
    chosen = select_backend(backend, b.device.type, BACKEND, b.dtype)
    chosen = fall_back_for_derivatives(chosen, backend, a, b, h0)
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        h = _scan(op, a.to(wide), b.to(wide), h0, reverse, backend)
        return h.to(b.dtype)
    h0 = None if h0 is None else h0.to(state_dtype(b.dtype))
    if chosen == "reference":
        return reference.scan(a, b, h0, reverse)
    return CALLS[op](a, b, h0, reverse)
