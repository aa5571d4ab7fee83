"""One layer and direction of a torch.nn LSTM, GRU or RNN, in as few calls as it takes.

The host's time is what a small call costs: so the caller has checked the arguments, and nothing is
done here that the common case does not need. stack.py runs all the others.
"""

from typing import Any, Optional, Tuple

import torch
from torch.nn.functional import linear

from .cells import CELLS
from .dispatch import BACKEND
from .formulas import CALLS, is_recorded
from .padding import pad_rows, pad_units, pad_weight, padded_width

# A product of fewer multiplications takes a GPU in exact fp32 less time than the host saves by torch's
# own operator: 20 us on an H100.
TF32_PRODUCTS = 500_000_000


def project(x: torch.Tensor, weight: torch.Tensor, tf32: bool) -> torch.Tensor:
    """x [..., I] times weight [O, I], on the device and in the dtype of the binary -> [..., O]."""
    if x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous():
        by_time = project(x.transpose(0, 1), weight, tf32)  # time first in memory stays so
        return by_time.transpose(0, 1)
    if BACKEND == "cpu":
        return CALLS["linear_fwd"](x, weight, None)
    x, weight = pad_rows(x, weight)
    if tf32 and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= TF32_PRODUCTS:
        y = CALLS["tf32_matmul"](x.reshape(1, -1, x.shape[-1]), weight.mT.unsqueeze(0))
        return y.view(*x.shape[:-1], weight.shape[0])
    return linear(x, weight)


def sum_biases(spec: Any, b_ih: torch.Tensor, b_hh: torch.Tensor) -> torch.Tensor:
    """[G * D] each -> [R, 1, D] in the states' dtype, in which the kernel adds them.

    Where gradients follow, as a - (-b): torch's sum hands one tensor to both, and two parameters that
    reach it through views would have their gradients in the same memory."""
    if b_ih.dtype in (torch.bfloat16, torch.float16):
        b_ih, b_hh = b_ih.float(), b_hh.float()
    rows = (
        2 * spec.gates - spec.bias_rows
    )  # what follows is added to the recurrent product by itself
    if rows == spec.gates:
        apart = is_recorded(b_ih, b_hh) or torch.jit.is_tracing()  # a trace may get gradients later
        return (b_ih - b_hh.neg() if apart else b_ih + b_hh).view(rows, 1, -1)
    i, h = b_ih.view(spec.gates, 1, -1), b_hh.view(spec.gates, 1, -1)
    return torch.cat((i[:rows] - h[:rows].neg(), i[rows:], h[rows:]))


def run_layer(
    cell: str,
    x: torch.Tensor,
    parameters: Tuple[torch.Tensor, ...],
    state: Optional[torch.Tensor],
    tf32: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, I] -> h [B, T, D], the last states [K, B, 1, D].

    `parameters` are torch's w_ih, w_hh and, if there are any, b_ih, b_hh, in the dtype of x; `state` is
    [K, B, 1, D] in the states' dtype or None."""
    spec = CELLS[cell]
    w_ih, w_hh, *biases = parameters
    G, D = spec.gates, w_hh.shape[1]
    weight = w_hh.view(G, 1, D, D)
    bias = sum_biases(spec, *biases) if biases else None
    P = padded_width(x.device.type, x.dtype, x.shape[1], D)
    if P != D:
        w_ih = pad_units(w_ih.view(G, D, -1).mT, P).mT.reshape(G * P, -1)
        weight, bias, state = pad_weight(weight, P), pad_units(bias, P), pad_units(state, P)
    gates = project(x, w_ih, tf32).view(*x.shape[:2], G, 1, P)
    masks = (None, None, None, None)
    save = is_recorded(gates, weight, bias, state)
    h, last, _, _ = CALLS[f"{cell}_fwd"](gates, weight, bias, state, *masks, None, tf32, save)
    h = h.squeeze(2)
    return (h, last) if P == D else (h[..., :D].contiguous(), last[..., :D])
