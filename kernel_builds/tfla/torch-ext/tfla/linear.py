"""The linear layers, norms and gates between two mLSTM steps of a model, for one token per row, in
few launches: on CUDA in 16 bits, `linear_step` on the CPU in every dtype, torch elsewhere. They
are for decoding and have no gradients."""

from typing import List, Optional, Sequence, Tuple

import torch

from .checks import (
    Named,
    check_flag,
    check_input,
    check_no_gradient,
    check_number,
    check_operands,
    check_shape,
    check_size,
    check_tensor,
    check_whole,
)
from .dispatch import BACKEND, ops, select_backend, without_autocast
from .int4 import GROUP, unpack_int4
from .memory import check_memory
from .sequences import state_dtype

MOST = 8  # most matrices in one launch
QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.uint8)  # dtypes of weights with scales


def linear_step(
    x, weights, biases=(), *, scales=(), capped=0, cap=0.0, norm_weight=None, norm_eps=1e-6,
    residual=None, gated=False, backend="auto",
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """Multiplies x [B, K] with weights [N_i, K]; returns a tensor [B, N_i] for each: weight_i x +
    bias_i.

    norm_weight [K]    x is normed before: x / sqrt(mean(x^2) + norm_eps) * norm_weight
    scales [N_i]       fp32, of the first matrices, which then are int8 or float8_e4m3fn: weight_i is
                       scales_i[:, None] * weights_i. Or bf16 [N_i, K / 32], of matrices of 4 bits, uint8
                       [N_i, K / 2]: weight_i is int4.unpack_int4(weights_i, scales_i)
    biases [N_i]       of the last matrices
    capped, cap        the last `capped` results come in fp32 (fp64), bounded: cap tanh(y / cap);
                       cap 0: no bound
    residual [B, N]    is added to the one matrix's output
    gated              of two matrices: silu(weight_0 x) * (weight_1 x) [B, N] alone

    At most 8 matrices, contiguous, of x's dtype if they have no scales; sums in fp32 (fp64), rounded once.
    Values of 8 and 4 bits are exact in every dtype of x, and scales multiply sums. On CUDA in 16
    bits every weight is read once for 16 rows of x (on Turing 8), at the memory's speed; more rows
    are a product for cuBLAS. Weights and scales may be read there while the preceding kernel on the
    stream still runs, so it must not write them. The reference computes float8_e4m3fn on a CPU, and
    on CUDA weights of 8 bits where K is no multiple of 16 and of 4 bits where K is no multiple of
    64. int4 on CUDA in 16 bits: with one row of x the products are integer products, and each of 64
    values of x is rounded to 2^-22 of the largest; with more rows 136 or 72 times x is added and
    subtracted again. So an infinite x gives NaN, and a row's last bits depend on whether it is
    alone.
    ValueError and TypeError name the argument.
    """
    _check("linear_step", x, weights, biases, norm_weight, residual, scales=scales)
    check_number("cap", cap)
    check_number("norm_eps", norm_eps)
    check_flag("gated", gated)
    check_whole("capped", capped, 0, f"an int, 0 to {len(weights)}")
    if not 0 <= capped <= len(weights):
        raise ValueError(f"capped is {capped}, but must be 0 to {len(weights)}")
    if residual is not None and len(weights) != 1:
        raise ValueError(f"weights are {len(weights)}, but must be one where residual is given")
    if residual is not None and capped:
        raise ValueError(f"capped is {capped}, but must be 0 where residual is given")
    if gated and (len(weights) != 2 or biases or capped):
        raise ValueError("gated is True, but needs two weights, no biases and nothing capped")
    if gated:
        check_shape("weights[1]", weights[1], tuple(weights[0].shape), "[N, K] of weights[0]")
        if len(scales) == 1:
            raise ValueError("scales are 1, but must be 2 or none where gated is True")
    if _select(backend, "linear_step", x, weights[0].dtype if scales else None) == "reference":
        rest = capped, cap, norm_weight, norm_eps, residual, gated
        with without_autocast(x.device.type):
            return _reference(x, weights, scales, biases, *rest)
    out, bounded = ops.linear_step(
        x, list(weights), list(scales), list(biases), capped, cap, norm_weight, norm_eps, residual,
        gated,
    )  # fmt: skip
    if gated or len(weights) == 1:  # a single result, bounded or not
        return (bounded if capped else out,)
    plain = len(weights) - capped
    rows = [w.shape[0] for w in weights]
    return *out.split(rows[:plain], -1), *(bounded.split(rows[plain:], -1) if capped else ())


def norm_step(
    x, norm_weight, norm_eps=1e-6, weights=(), biases=(), *, cap=0.0, backend="auto"
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """Norms rows and multiplies: x [B, K] -> y = x / sqrt(mean(x^2) + norm_eps) * norm_weight, and
    for each of weights [N_i, K], a few rows such as gates', weight_i y + bias_i [B, N_i] in
    fp32, bounded: cap tanh(. / cap).

    Arguments otherwise as linear_step's.
    """
    check_number("cap", cap)
    check_number("norm_eps", norm_eps)
    norm_weight = check_tensor("norm_weight", norm_weight)
    _check("norm_step", x, weights, biases, norm_weight, None, least=0)
    if _select(backend, "norm_step", x) != "reference":
        out, bounded = ops.norm_step(x, norm_weight, norm_eps, list(weights), list(biases), cap)
        return out, *(bounded.split([w.shape[0] for w in weights], -1) if weights else ())
    wide = state_dtype(x.dtype)
    out = _norm(x.to(wide), norm_weight, norm_eps).to(x.dtype)
    rest = (len(weights), cap, None, norm_eps, None, False)
    with without_autocast(x.device.type):
        return out, *(_reference(out, weights, (), biases, *rest) if weights else ())


def gate_step(gate, up, *, backend="auto") -> torch.Tensor:
    """Computes silu(gate) * up of [B, N], N a multiple of 8, rounded once."""
    check_input("gate", gate)
    if gate.dim() != 2 or gate.shape[1] % 8:
        shape = list(gate.shape)
        raise ValueError(f"gate has shape {shape}, but must be [B, N] with N a multiple of 8")
    check_tensor("up", up, gate.device)
    check_shape("up", up, tuple(gate.shape), "[B, N]")
    if up.dtype != gate.dtype:
        raise TypeError(f"up has dtype {up.dtype}, but must be {gate.dtype}, gate's")
    check_memory(("gate", "up", "up"), gate, up)
    check_no_gradient("gate_step", ("gate", "up", "up"), gate, up)
    if _select(backend, "gate_step", gate) != "reference":
        return ops.gate_step(gate, up)
    wide = state_dtype(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up).to(gate.dtype)


def _select(backend: str, name: str, x, kept: Optional[torch.dtype] = None) -> str:
    """Returns which implementation runs; `kept` is the dtype of weights with scales."""
    if BACKEND == "cpu":
        fits = name == "linear_step" and kept is not torch.float8_e4m3fn
    else:
        fits = x.dtype in (torch.bfloat16, torch.float16)
        fits = fits and (kept is None or x.shape[1] % (64 if kept is torch.uint8 else 16) == 0)
    if isinstance(backend, str) and backend == BACKEND == x.device.type and not fits:
        multiple = 64 if kept is torch.uint8 else 16
        only = f" (16 bits, and K a multiple of {multiple})" if BACKEND == "cuda" else ""
        raise ValueError(
            f"backend is {backend!r}, but {name} has no kernel there for x {x.dtype} {list(x.shape)} "
            f"and weights {kept or x.dtype}{only}: ask for 'auto'"
        )
    return select_backend(backend, x.device.type, BACKEND if fits else None, x.dtype)


def _norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _check(
    who: str, x, weights: Sequence, biases: Sequence, norm_weight, residual, least: int = 1,
    scales: Sequence = (),
) -> None:  # fmt: skip
    check_input("x", x)
    if x.dim() != 2 or x.shape[1] % 8:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [B, K] with K a multiple of 8")
    for name, given in (("weights", weights), ("biases", biases), ("scales", scales)):
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"{name} is a {type(given).__name__}, but must be a list of tensors")
    if not least <= len(weights) <= MOST:
        raise ValueError(f"weights are {len(weights)}, but must be {least} to {MOST} matrices")
    if len(biases) > len(weights):
        raise ValueError(f"biases are {len(biases)}, but must be at most one for each weight")
    if len(scales) > len(weights):
        raise ValueError(f"scales are {len(scales)}, but must be at most one for each weight")
    for i, w in enumerate(weights):
        check_tensor(f"weights[{i}]", w, x.device)
        check_size(f"weights[{i}]", w)
        if w.dim() != 2:
            raise ValueError(f"weights[{i}] has shape {list(w.shape)}, but must be [N, K]")
    rows, K = [w.shape[0] for w in weights], x.shape[1]
    packed = bool(scales) and weights[0].dtype == torch.uint8
    if packed and K % GROUP:
        raise ValueError(
            f"x has shape {list(x.shape)}, but needs K a multiple of {GROUP} for 4 bits"
        )
    narrow = (K // 2, "[N, K / 2]") if packed else (K, "[N, K]")
    shapes: List[Named] = [
        (f"weights[{i}]", w, (n, width), letters)
        for i, (w, n) in enumerate(zip(weights, rows))
        for width, letters in [narrow if i < len(scales) else (K, "[N, K]")]
    ]
    kept, named = shapes[: len(scales)], shapes[len(scales) :]
    if kept and weights[0].dtype not in QUANTIZED:
        wanted = "int8, float8_e4m3fn or uint8 where scales are given"
        raise TypeError(f"weights[0] has dtype {weights[0].dtype}, but must be {wanted}")
    factors: List[Named] = [
        (f"scales[{i}]", s, (n, K // GROUP) if packed else (n,), "[N, K / 32]" if packed else "[N]")
        for i, (s, n) in enumerate(zip(scales, rows))
    ]
    check_operands(factors, torch.bfloat16 if packed else torch.float32, x.device)
    for name, w, shape, letters in kept:
        check_shape(name, w, shape, letters)
        if w.dtype != weights[0].dtype:
            raise TypeError(f"{name} has dtype {w.dtype}, but must be {weights[0].dtype}")
    first = len(weights) - len(biases)
    named += [
        (f"biases[{i}]", b, (n,), "[N]") for i, (b, n) in enumerate(zip(biases, rows[first:]))
    ]
    if norm_weight is not None:
        named.append(("norm_weight", norm_weight, (x.shape[1],), "[K]"))
    if residual is not None:
        named.append(("residual", residual, (x.shape[0], rows[0]), "[B, N]"))
    check_operands(named, x.dtype, x.device)
    named += [*kept, *factors]
    names, values = ("x", *(n for n, _, _, _ in named), ""), (x, *(v for _, v, _, _ in named))
    check_memory(names, *values)
    check_no_gradient(who, names, *values)
    read = [(f"weights[{i}]", w) for i, w in enumerate(weights)]
    read += [(f"scales[{i}]", s) for i, s in enumerate(scales) if packed]
    for name, value in read:  # a copy would be written while the kernel begins
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}, but must be contiguous")


def _product(x, weight, scale):
    """Returns x weight^T for a weight with scales."""
    if weight.dtype == torch.uint8:
        return x @ unpack_int4(weight, scale, x.dtype).mT
    return (x @ weight.to(x.dtype).mT) * scale


def _reference(x, weights, scales, biases, capped, cap, norm_weight, norm_eps, residual, gated):
    io, wide = x.dtype, state_dtype(x.dtype)
    x = x.to(wide)
    if norm_weight is not None:
        x = _norm(x, norm_weight, norm_eps)
    outs = [x @ w.to(wide).mT for w in weights[len(scales) :]]
    outs = [_product(x, w, s) for w, s in zip(weights, scales)] + outs
    for i, b in enumerate(biases, len(weights) - len(biases)):
        outs[i] = outs[i] + b
    if gated:
        outs = [torch.nn.functional.silu(outs[0]) * outs[1]]
    if residual is not None:
        outs = [outs[0] + residual]
    plain = len(outs) - capped
    bounded = [cap * torch.tanh(y / cap) if cap > 0 else y for y in outs[plain:]]
    return *(y.to(io) for y in outs[:plain]), *bounded
