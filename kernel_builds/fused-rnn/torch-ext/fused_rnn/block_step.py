"""One decoding step of a whole residual block around a cell: one call on the CPU, torch elsewhere.
The states are changed in place; there are no gradients."""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from . import reference
from .checks import (
    STATE,
    Named,
    check_count,
    check_input,
    check_no_gradient,
    check_number,
    check_operands,
    check_shape,
    check_size,
    check_tensor,
    find_cell,
    is_dense,
)
from .dispatch import BACKEND, ops, select_backend
from .int4 import GROUP, unpack_int4
from .memory import check_apart, check_written
from .sequences import state_dtype

NAMES = ("x", "mixer_norm", "in_proj", "weight", "bias", "mlp_norm", "gate", "up", "down")
SCALES = tuple(f"scales[{i}]" for i in range(4))


def block_step(
    cell: str, x: Tensor, mixer_norm: Tensor, in_proj: Tensor, weight: Tensor,
    bias: Optional[Tensor], state: Tuple[Tensor, ...], mlp_norm: Tensor, gate: Tensor, up: Tensor,
    down: Tensor, *, scales: Tuple[Tensor, ...] = (), mixer_eps: float = 1e-6,
    mlp_eps: float = 1e-6, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Runs one token per row through a Llama-style block whose mixer is the cell named `cell`.

        u = in_proj n(x),  n(x) = x / sqrt(mean(x^2) + mixer_eps) * mixer_norm
        h', state' = cell(u, weight, bias, state)                      y = x + h'
        out = y + down (silu(gate m(y)) * (up m(y))),  m(y) as n with mlp_eps and mlp_norm

    x [B, H] -> out [B, H], H = N D; mixer_norm, mlp_norm [H], in_proj [G H, H], weight [G, N, D, D], bias
    [R, N, D] or None, gate, up [I, H], down [H, I], all of x's dtype and contiguous. state: the cell's
    tensors [B, N, D] in fp32 (fp64 for fp64), contiguous, changed; zeros are the empty one. Sums are in
    fp32 (fp64); of what lies between x and out only operands of products are rounded to x's dtype.
    With scales, fp32 [G H], [I], [I], [H], the linear layers' weights are int8, and each row of in_proj, gate,
    up and down is multiplied by its scale. With bf16 scales [., K / 32] they have 4 bits, uint8 [., K / 2] for
    a layer of K inputs: int4.unpack_int4(in_proj, scales[0]) and so on. weight stays in x's dtype.
    On the CPU all of it is one parallel region that reads the weights once for 8 rows; "auto" elsewhere is
    the reference. ValueError and TypeError name the argument, what it was and what it must be.
    """
    spec = find_cell(cell)
    check_input("x", x)
    check_tensor("weight", weight, x.device)
    check_tensor("gate", gate, x.device)
    check_size("gate", gate)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [B, H]")
    if gate.dim() != 2:
        raise ValueError(f"gate has shape {list(gate.shape)}, but must be [I, H]")
    (B, H), G, width = x.shape, spec.gates, gate.shape[0]
    N, D = weight.shape[1:3] if weight.dim() == 4 else (1, H)
    if N * D != H:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be [G, N, D, D] with N D = {H}"
        )
    named: List[Named] = [
        ("mixer_norm", mixer_norm, (H,), "[H]"), ("weight", weight, (G, N, D, D), "[G, N, D, D]"),
        ("bias", bias, (spec.bias_rows, N, D), "[R, N, D]"), ("mlp_norm", mlp_norm, (H,), "[H]"),
    ]  # fmt: skip
    linears: List[Named] = [
        ("in_proj", in_proj, (G * H, H), "[G H, H]"), ("gate", gate, (width, H), "[I, H]"),
        ("up", up, (width, H), "[I, H]"), ("down", down, (H, width), "[H, I]"),
    ]  # fmt: skip
    check_operands(named, x.dtype, x.device)
    named += linears
    if isinstance(scales, (tuple, list)) and not scales:
        check_operands(linears, x.dtype, x.device)
    else:
        named += _check_scaled(linears, scales, x.device)
    check_count("state", state, spec.states, spec.name)
    wide = state_dtype(x.dtype)
    states = [(STATE[k], s, (B, N, D), "[B, N, D]") for k, s in enumerate(state)]
    check_operands(states, wide, x.device)
    check_number("mixer_eps", mixer_eps)
    check_number("mlp_eps", mlp_eps)
    given = (x, mixer_norm, in_proj, weight, bias, mlp_norm, gate, up, down, *scales, *state)
    names = (*NAMES, *(SCALES if scales else ()), "state")
    check_no_gradient("block_step", names, *given)
    for k, s in enumerate(state):
        check_written(STATE[k], s)
    check_apart(names, spec.states, *given)
    if not is_dense(*given[1:]):
        for name, value, _, _ in (*named, *states):
            if not is_dense(value):
                had = value.stride()
                raise ValueError(f"{name} has strides {had}, but must be contiguous")
    binary = BACKEND if BACKEND == "cpu" else None
    if select_backend(backend, x.device.type, binary, x.dtype) == "cpu":
        return getattr(ops, f"{cell}_block_step_")(
            x, mixer_norm, mixer_eps, in_proj, weight, bias, list(state), mlp_norm, mlp_eps, gate, up, down,
            list(scales),
        )  # fmt: skip
    # operands of products are rounded to x's dtype, as in the kernel
    operand = lambda t: t.to(x.dtype).to(wide)
    in_proj, gate, up, down = (
        w.to(wide) if s is None
        else unpack_int4(w, s, wide) if w.dtype == torch.uint8
        else w.to(wide) * s[:, None]
        for w, s in zip((in_proj, gate, up, down), scales or (None,) * 4)
    )  # fmt: skip
    rounded = operand(_norm(x.to(wide), mixer_norm, mixer_eps))
    u = (rounded @ in_proj.mT).view(B, G, N, D)
    r = list(reference.RecurrentProduct.apply(state[0], weight.to(wide), x.dtype, None))
    if bias is not None:
        u = u + bias[:G]
        if spec.bias_rows > G:
            r[-1] = r[-1] + bias[G]
    after = spec.step(u.unbind(1), tuple(r), tuple(s.clone() for s in state))
    for s, new in zip(state, after):
        s.copy_(new)
    y = x + after[0].reshape(B, H)
    inside = operand(_norm(y, mlp_norm, mlp_eps))
    inner = silu(inside @ gate.mT) * (inside @ up.mT)
    return (y + operand(inner) @ down.mT).to(x.dtype)


def _check_scaled(
    linears: Sequence[Named], scales: Tuple[Tensor, ...], device: torch.device
) -> List[Named]:
    """Checks weights of 8 or 4 bits and their scales; returns the scales with names and shapes."""
    if not isinstance(scales, (tuple, list)) or len(scales) != len(linears):
        had = len(scales) if isinstance(scales, (tuple, list)) else type(scales).__name__
        raise ValueError(f"scales are {had}, but must be a tuple of {len(linears)} tensors, or ()")
    factors: List[Named] = []
    packed = torch.is_tensor(linears[0][1]) and linears[0][1].dtype == torch.uint8
    dtype = torch.uint8 if packed else torch.int8
    for i, (name, value, (rows, K), letters) in enumerate(linears):
        if packed and K % GROUP:
            raise ValueError(f"{name} is of {K} inputs, but needs a multiple of {GROUP} for 4 bits")
        check_tensor(name, value, device)
        if value.dtype != dtype:
            wanted = f"{dtype} as in_proj" if i else "int8 or uint8 where scales are given"
            raise TypeError(f"{name} has dtype {value.dtype}, but must be {wanted}")
        row = letters.split(",")[0]
        if packed:
            check_shape(name, value, (rows, K // 2), f"{letters[:-1]} / 2]")
            factors.append((SCALES[i], scales[i], (rows, K // GROUP), f"{letters[:-1]} / 32]"))
        else:
            check_shape(name, value, (rows, K), letters)
            factors.append((SCALES[i], scales[i], (rows,), f"{row}]"))
    check_operands(factors, torch.bfloat16 if packed else torch.float32, device)
    return factors


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
