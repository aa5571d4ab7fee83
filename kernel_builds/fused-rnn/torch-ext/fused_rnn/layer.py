"""Runs one layer and direction of a torch.nn LSTM, GRU or RNN with as few calls as possible.

The host limits the speed of a small call. So the caller has checked the arguments, and this file does
nothing that the common case does not need; stack.py runs all other cases.
"""

from typing import Any, Optional, Tuple

import torch
from torch.nn.functional import linear

from .cells import CELLS
from .dispatch import BACKEND
from .formulas import CALLS, is_recorded
from .padding import pad_rows, pad_units, pad_weight, padded_width

# From this many multiplications on, which take an H100 about 20 us in exact fp32, TF32 saves the GPU
# more time than our operator costs the host beyond torch's.
TF32_PRODUCTS = 500_000_000


def project(x: torch.Tensor, weight: torch.Tensor, tf32: bool) -> torch.Tensor:
    """Returns the product of x [..., I] and weight [O, I], which is [..., O] in the dtype of x."""
    if x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous():
        return project(x.transpose(0, 1), weight, tf32).transpose(0, 1)  # time stays outermost
    if BACKEND == "cpu":
        return CALLS["linear_fwd"](x, weight, None)
    x, weight = pad_rows(x, weight)
    if tf32 and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= TF32_PRODUCTS:
        y = CALLS["tf32_matmul"](x.reshape(1, -1, x.shape[-1]), weight.mT.unsqueeze(0))
        return y.view(*x.shape[:-1], weight.shape[0])
    return linear(x, weight)


def sum_biases(spec: Any, b_ih: torch.Tensor, b_hh: torch.Tensor) -> torch.Tensor:
    """Adds the biases, [G * D] each; returns [R, 1, D] in the states' dtype, as the kernel takes it.

    If gradients are recorded, it computes a - (-b): the backward of a + b returns one tensor for both,
    and the gradients of the two parameters, which are views here, would share its memory."""
    if b_ih.dtype in (torch.bfloat16, torch.float16):
        b_ih, b_hh = b_ih.float(), b_hh.float()
    # b_hh of the gates after these is added to their recurrent product, so it stays apart.
    rows = 2 * spec.gates - spec.bias_rows
    if rows == spec.gates:
        apart = is_recorded(b_ih, b_hh) or torch.jit.is_tracing()  # a trace may be trained
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
    """Returns h [B, T, D] and the last states [K, B, 1, D] for the input x [B, T, I].

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
