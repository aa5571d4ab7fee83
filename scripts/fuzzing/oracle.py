"""Checks a fuzzed call: it must match the reference, or raise an error that names an argument."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from numerics import EPS, assert_as_accurate, rms

REFUSALS = (TypeError, ValueError, RuntimeError)
# Text that is about the library's inside, not about the call.
INTERNAL = re.compile(
    r"csrc/|\.(?:h|cpp|cuh|py):\d+|in_place|INTERNAL ASSERT|enforce fail|Declaration:|aten::|dispatch"
    r"|Could not run|Internal error|object has no attribute|unsupported operand|std::"
)
# torch's own check of a schema, and the place that its stable check macro puts ahead of every message
SCHEMA = re.compile(r"for argument '(\w+)'|argument '(\w+)' \(position")
PLACE = re.compile(r"^\w+, [\w/.-]+:\d+, ")
# autograd's own words: it knows the tensors that it saves, not whose arguments they are
INFERENCE = "Inference tensors cannot be saved for backward"
# torch's errors for a negated view that is passed to an op which changes that argument
NEGATED = re.compile(r"MathBitsFallback|mutable TensorLists with negation|negation fallback")
ANY_STRIDES = {"transposed", "sliced", "every_second", "misaligned", "neighbours"}
OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory")


def is_out_of_memory(error: BaseException, faults: Iterable[str]) -> bool:
    """Whether copying a huge view ran out of memory.

    Through torch's stable ABI, an error says where it happened and not what it was."""
    text = str(error)
    told = isinstance(error, MemoryError) or "API call failed" in text
    return any("huge" in fault for fault in faults) and bool(told or OUT_OF_MEMORY.search(text))


def is_torchs(error: BaseException, faults: Iterable[str], raw: bool) -> bool:
    """Whether torch itself refused this kind of tensor, before the kernel was called."""
    kinds, text = {fault.rpartition(" ")[2] for fault in faults}, str(error)
    if raw and kinds & {"negated", "imaginary"} and NEGATED.search(text):
        return True
    if raw and {"of_inference", "other_layout"} <= kinds and text.endswith(".default"):
        return isinstance(error, NotImplementedError)  # jagged tensors raise it from Python
    return "of_inference" in kinds and text.startswith(INFERENCE)


def check_refusal(
    error: BaseException, names: Iterable[str], faults: Iterable[str], raw: bool
) -> str | None:
    """Returns what is wrong with an exception that a call raised, if anything.

    A raw op's messages begin with a source location, which torch's macro writes; torch checks the
    types of its arguments."""
    kind, text = type(error).__name__, str(error)
    ordinary = isinstance(error, REFUSALS) and "Could not run" not in text
    if not ordinary or (type(error) not in REFUSALS and not raw):
        return f"{kind}: {shorten(text)}"
    if is_torchs(error, faults, raw):
        return None
    if raw:
        text = PLACE.sub("", text)
        if SCHEMA.search(text):
            return None
    if INTERNAL.search(text):
        return f"internal text in {kind}: {shorten(text)}"
    verbs = "is|are|has|have|must|needs|requires|begins|gives|shares|and"
    if not re.search(rf"\b({'|'.join(names)})(\[\d+\])*(\(\.\.\.\))?,? ({verbs})\b", text):
        return f"{kind} names no argument: {shorten(text)}"
    return None


def computed_in(got: dict[str, torch.Tensor]) -> torch.dtype:
    """Returns the dtype a kernel rounds to: the narrower of its first result and first argument."""
    floats = {n: t.dtype for n, t in got.items() if t.is_floating_point()}
    first = [
        next(d for n, d in floats.items() if n.startswith("result") == is_result)
        for is_result in (True, False)
    ]
    return min(first, key=lambda d: d.itemsize)


def is_valid(faults: list[str]) -> bool:
    """Whether the faults change memory layouts only, so that the call is valid."""
    return all(fault.rpartition(" ")[2] in ANY_STRIDES for fault in faults)


DECODING = "_step", "_fold"  # how names of functions without gradients end


def is_of_decoding(name: str, error: Exception) -> bool:
    """Whether the error is a documented limit of decoding functions.

    They have no gradients, need contiguous weight rows, and update states in place."""
    says = "is for decoding|must be .*contiguous|is written|inplace=True"
    return name.endswith(DECODING) and bool(re.search(says, str(error)))


def shorten(text: str) -> str:
    """Shortens a message to one line without numbers that vary, so that equal findings look
    equal."""
    line = next((line for line in text.strip().splitlines() if line.strip()), "")
    line = re.sub(r"0x[0-9a-f]+", "0x..", line)
    line = re.sub(r"'_\w+::\w+'", "'...'", line)
    return re.sub(r"\[[-\d, ]*\]|\b\d[\d.e+-]*", "#", line)[:160]


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a result or an argument, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            yield from tensors(item, f"{name}[{k}]")


def outcome(result: Any, call: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Collects a call's results, the arguments that it changed, and all gradients."""
    results = dict(tensors(result, "result"))
    sources = {n: t for k, v in call.items() for n, t in tensors(v, k) if t.requires_grad}
    named = {name: t.detach() for name, t in results.items()}
    for key, value in call.items():
        named |= {name: t.detach() for name, t in tensors(value, key)}
    outputs = {n: t for n, t in results.items() if t.requires_grad}
    grads: list[torch.Tensor | None] = [None] * len(sources)
    if outputs and sources:
        draw = lambda n, t: torch.randn(t.shape, generator=seeded(seed, n), dtype=torch.float64)
        given = [draw(n, t).to(t.dtype) for n, t in outputs.items()]
        wanted = list(outputs.values()), list(sources.values())
        grads = list(torch.autograd.grad(*wanted, given, allow_unused=True))
    for name, grad, source in zip(sources, grads, sources.values(), strict=True):
        named[f"gradient of {name}"] = torch.zeros_like(source.detach()) if grad is None else grad
    return named


def seeded(seed: int, name: str) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed * 1000 + sum(map(ord, name)))


# Bounds for mLSTM, whose divisor may nearly cancel, as in tests/ops/tfla/test_sequence.py. They are
# relative to the rms, but at least to 1: gradients may cancel to 0, and their terms are of size one.
MLSTM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def differences(
    got: dict,
    exact: dict,
    peer: dict,
    terms: int,
    moved: list[dict] | None = None,
    relative: float = 0.0,
    io: torch.dtype = torch.float64,
    wild: bool = False,
    carried: float = 0.0,
) -> list[str]:
    """Returns where `got` differs from `exact` by more than the error of `peer` allows.

    `peer` is the reference in the same dtype.

    Where both references are finite the kernel must be too, and where neither is the kernel must not
    be. `moved` are results like `exact` for inputs that differ by a rounding: they show how ill
    conditioned the call is. `wild` says that an argument is so large that its square is not finite.
    Errors of gradients that cancel to 0 are relative to the size of their terms: one, or if `wild` that
    of the largest argument. `io` is the dtype of the computation. `carried` is the largest state or norm weight: results may be small differences
    of terms of that size.
    """
    found = []
    if set(got) != set(exact):
        return [f"gives {sorted(set(got) ^ set(exact))} on one side alone"]
    for name, value in got.items():
        if value.dtype not in EPS:  # whole numbers, and the 8-bit ones that solve widens
            is_gradient = name.startswith("gradient")  # autograd rounds it to 8 bits
            if not is_gradient and not torch.equal(plain(value), plain(exact[name])):
                found.append(f"{name} differs")
            continue
        want, same = exact[name], peer[name]
        if value.shape != want.shape or value.dtype != same.dtype:
            found.append(
                f"{name} is {value.dtype} {list(value.shape)}, the reference's is otherwise"
            )
            continue
        value = value.contiguous() if value.layout == torch.strided else value.to_dense()
        sure = want.isfinite() & same.isfinite()
        if wild and name.startswith("gradient"):  # a term 0 * inf is NaN or left out
            sure &= value.isfinite()
        if bool((sure & ~value.isfinite()).any()):
            found.append(f"{name} is not finite where the reference is")
            continue
        # NaN where it is infinite: inf - inf, of terms in another order.
        bounded = want.isinf() & (want == same) & ~(value.isnan() | (value == want))
        if bool(bounded.any()) and not name.startswith("gradient"):
            found.append(f"{name} is not infinite where the reference is")
            continue
        lost = value.isfinite() & want.isnan() & same.isnan()
        if bool(lost.any()) and not name.startswith("gradient"):
            found.append(f"{name} is finite where the reference is NaN")
            continue
        if not bool(sure.any()):
            continue
        value, want, same = value[sure], want[sure], same[sure]
        if moved is not None and moved[0][name].shape == sure.shape:
            is_gradient = name.startswith("gradient")
            gaps = [(m[name][sure] - want).nan_to_num(0.0, 0.0, 0.0).abs() for m in moved]
            gap = torch.stack(gaps).amax(0)
            if is_gradient and rms(want) <= EPS[value.dtype]:  # terms of size one that cancel
                size = largest_argument(got) if wild else 1.0
                if rms(value - want) > 8 * max(EPS[value.dtype], EPS[io]) * size + 2 * rms(gap):
                    found.append(f"{name} is not 0 where the reference is")
                continue
            scale = max(rms(want), 1.0 if is_gradient else 0.0)
            summed = 8 * EPS[max(value.dtype, torch.float32, key=lambda d: d.itemsize)]
            more = relative * scale + summed * max(scale, carried)
            same = want + (same - want).abs() + 2 * gap + more
        try:
            assert_as_accurate(name, value, want.double(), same, terms)
        except AssertionError as error:
            found.append(str(error))
    return found


def largest_argument(named: dict[str, torch.Tensor]) -> float:
    """Returns the largest finite value of a call's arguments, or 1 if that is larger."""
    given = [t for n, t in named.items() if not n.startswith(("result", "gradient")) and t.numel()]
    sizes = (
        float(t.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in given if t.dtype in EPS
    )
    return max(1.0, *sizes)


def leave_products_out(want: dict, without: dict, got: dict, weight: torch.Tensor) -> None:
    """Changes the results of a reference, `want`, for a recurrent weight that is not finite.

    A kernel leaves its product out where h is 0: without a state and after a reset. So where a result
    is NaN in the reference alone, that of a weight with zeros instead, in `without`, counts. Where the
    weight has inf, later steps may then be finite, too, and no value is required. Gradients depend on
    such values, so then none is compared."""
    differ = False
    for name, value in want.items():
        if name.startswith("gradient") or value.dtype not in EPS:
            continue
        left_out = value.isnan() & got[name].isfinite() & without[name].isfinite()
        other = got[name].to(value) if bool(weight.isinf().any()) else without[name]
        want[name] = torch.where(left_out, other, value)
        differ |= bool(left_out.any())
    for name, value in want.items():
        if differ and name.startswith("gradient") and value.shape == got[name].shape:
            want[name] = got[name].to(value)


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.dequantize() if t.is_quantized else t.double()


def nudge(value: Any, dtype: torch.dtype, seed: int) -> Any:
    """Moves every float up or down by one rounding of `dtype`."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_meta:
        signs = (
            torch.randint(0, 2, value.shape, generator=torch.Generator("cpu").manual_seed(seed)) * 2
            - 1
        )
        moved = value.detach() * (1 + 2 * EPS[dtype] * signs)
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return getattr(type(value), "_make", type(value))([nudge(v, dtype, seed) for v in value])
    return value


def widen(value: Any) -> Any:
    """Converts floating tensors to float64, keeping requires_grad."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return getattr(type(value), "_make", type(value))([widen(v) for v in value])
    return value


def is_readable(t: torch.Tensor) -> bool:
    """Whether the storage holds the whole tensor; torch does not check, and a read would crash."""
    if t.layout != torch.strided or t.is_nested or t.device.type != "cpu" or not t.numel():
        return True
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    needed = (t.storage_offset() + reach + 1) * t.element_size()
    return needed <= t.untyped_storage().nbytes()


def spare_large(
    h: torch.Tensor, exact: torch.Tensor, peer: torch.Tensor, computed: torch.dtype
) -> None:
    """Requires no value of an mLSTM's rows that are so large that their squares are inf.

    inf - inf, of terms in another order, is NaN; the norm of a row with inf is 0 and NaN. `h` is the
    result without the norm, `exact` and `peer` are what the results are compared with."""
    large = h.abs() >= torch.finfo(computed).max ** 0.5
    spared = large.any(-1, keepdim=True) & ~h.isnan().any(-1, keepdim=True)
    exact.masked_fill_(spared, float("nan"))
    peer.masked_fill_(spared, 0.0)  # NaN in one alone: no value is required
