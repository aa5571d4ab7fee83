"""The projection of a layer's input."""

import torch
from torch.nn.functional import linear

from .dispatch import BACKEND
from .formulas import CALLS
from .padding import pad_rows

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
