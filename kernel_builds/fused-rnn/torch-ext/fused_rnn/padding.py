"""Pads odd widths on CUDA with units that stay zero, so that a row is a multiple of 16 bytes.

A unit whose weights, bias, input and initial state are 0 has h = 0 at every step, in every cell, and
adds nothing to the other units; its gradients are 0 too. So a head of width D runs as one of width P,
the next multiple of 8 (fp32: of 4 up to 256 units), on the engines that read vectors of 16 bytes. The
outputs are the first D units.
"""

from typing import Any, Optional, Tuple

import torch
from torch.nn.functional import pad

VECTOR_BYTES = 16
# Products of wider heads are a quarter slower where a row does not begin at a multiple of 32 bytes,
# which is what the L2 cache reads.
WIDEST_BY_VECTORS = 256
SEVERAL_STEPS = 2  # any number above one
# The step engine takes any width: a single step with fewer multiplications is not padded, because
# padding would take longer than it saves.
LEAST_PRODUCTS = 500_000_000
LEAST_WITHOUT_STATE = 3_000_000_000  # where h is 0, the recurrent weight is not read


def padded_width(
    device_type: str, dtype: torch.dtype, steps: int, width: int, rows: int = 1, state: bool = True
) -> int:
    """Returns P for heads of `width` units, or `width` where padding would gain nothing.

    A single step is padded if the products of its `rows` are large. `state`: whether it has an h."""
    if device_type != "cuda" or dtype == torch.float64:
        return width
    if steps == 1 and not _reaches(8 * rows * width * width, state):
        return width
    units = VECTOR_BYTES // dtype.itemsize
    if width % units != 0 and width > WIDEST_BY_VECTORS:
        units = 8
    return -(-width // units) * units


def _reaches(products: Any, state: bool = True) -> bool:
    """Whether so many products are worth padding. A number that torch.export leaves open is not asked for
    its size: the answer would bound the batch of the exported program."""
    if isinstance(products, torch.SymInt) or torch.compiler.is_exporting():
        return False
    return products >= (LEAST_PRODUCTS if state else LEAST_WITHOUT_STATE)


def pad_weight(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Pads a recurrent weight [..., D, D] with zeros to [..., P, P]; `width` is P."""
    more = width - weight.shape[-1]
    return pad(weight, (0, more, 0, more))


def pad_units(x: Optional[torch.Tensor], width: int) -> Any:
    """Pads the units of x [..., D] with zeros to [..., P]; `width` is P."""
    return x if x is None or x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def pad_call(width: int, x: torch.Tensor, weight: Any, bias: Any, state: Any) -> Tuple[Any, ...]:
    """Pads x [B, T, G, N, D] and the other tensors of an op's call to width P."""
    return (
        pad_units(x, width),
        pad_weight(weight, width),
        pad_units(bias, width),
        pad_units(state, width),
    )


def pad_heads(heads: Any, gates: int, width: int, inner: int = 0) -> Any:
    """Pads a stack.Heads to width P.

    `inner` is the number of directions of the layer below, whose padded outputs this layer reads; 0 for
    the first layer."""
    w_ih, w_hh, bias, w_hr, w_h0 = heads
    D, N, more = w_hh.shape[-1], len(w_ih), width - w_hh.shape[-1]

    def rows(w: torch.Tensor) -> torch.Tensor:  # [N, G * D, I] -> [N, G * P, I]
        return pad(w.view(N, gates, D, -1), (0, 0, 0, more)).flatten(1, 2)

    if inner > 0 and w_hr is None:
        w_ih = pad(w_ih.view(N, gates * D, inner, D), (0, more)).flatten(2)
    w_hr = None if w_hr is None else pad_units(w_hr, width)
    w_h0 = None if w_h0 is None else rows(w_h0)
    return heads._replace(
        w_ih=rows(w_ih),
        w_hh=pad_weight(w_hh, width),
        bias=pad_units(bias, width),
        w_hr=w_hr,
        w_h0=w_h0,
    )


def rows_are_padded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [..., I] and weight [..., O, I] are padded before their product on CUDA: it is so large
    that this saves more time than the copies take."""
    width = x.shape[-1]
    if padded_width(x.device.type, x.dtype, SEVERAL_STEPS, width) == width:
        return False
    return _reaches(x.numel() * weight.shape[-2])


def pad_rows(x: torch.Tensor, weight: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns x [..., I] and weight [..., O, I], with I padded to a multiple of 16 bytes if
    rows_are_padded."""
    if not rows_are_padded(x, weight):
        return x, weight
    width = padded_width(x.device.type, x.dtype, SEVERAL_STEPS, x.shape[-1])
    return pad_units(x, width), pad_units(weight, width)
