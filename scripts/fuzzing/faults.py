"""Changes to a valid call: unusual layouts of the same values, and invalid arguments.

A fault takes a `Draw` and a value, and returns another value, or SAME where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fuzzing.draw import FLOATS, Draw
from fuzzing.oracle import is_readable
from fuzzing.shared import neighbours, shared

Fault = Callable[[Draw, Any], Any]
SAME = object()
NAN, INF = float("nan"), float("inf")
MOST = 2**24  # elements that a fault may copy
HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62)


# --- the same values, lying in memory otherwise: a call takes them, or says why not


def transposed(draw: Draw, t: torch.Tensor) -> Any:
    order = list(range(t.dim()))
    draw.rng.shuffle(order)
    back = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(back)


def sliced(draw: Draw, t: torch.Tensor) -> Any:
    if t.dim() == 0:
        return SAME
    d, before, after = draw.rng.randrange(t.dim()), draw.rng.randint(0, 3), draw.rng.randint(0, 3)
    shape = list(t.shape)
    shape[d] += before + after
    wide = t.new_zeros(shape)
    part = wide.narrow(d, before, t.shape[d])
    part.copy_(t)
    return part


def every_second(draw: Draw, t: torch.Tensor) -> Any:
    wide = torch.stack([t, t], -1)
    return wide[..., draw.rng.randint(0, 1)]


def misaligned(draw: Draw, t: torch.Tensor) -> Any:
    flat = t.new_zeros(t.numel() + 5)[draw.rng.randint(1, 4) :][: t.numel()]
    return flat.view(t.shape).copy_(t)


def negated(draw: Draw, t: torch.Tensor) -> Any:
    return torch._neg_view(-t) if t.is_floating_point() else SAME


def imaginary(draw: Draw, t: torch.Tensor) -> Any:
    """Returns the imaginary part of a lazy conjugate: stride two, with the negative bit set."""
    if t.dtype not in (torch.float32, torch.float64):
        return SAME
    return torch.complex(t, -t).conj().imag


def parameter(draw: Draw, t: torch.Tensor) -> Any:
    return torch.nn.Parameter(t) if t.is_floating_point() else SAME


def requires_grad(draw: Draw, t: torch.Tensor) -> Any:
    return t.detach().requires_grad_() if t.is_floating_point() else SAME


def of_inference(draw: Draw, t: torch.Tensor) -> Any:
    with torch.inference_mode():
        return t.clone()


# --- other values of the same shape and dtype


def expanded(draw: Draw, t: torch.Tensor) -> Any:
    if t.dim() == 0 or 0 in t.shape:
        return SAME
    d = draw.rng.randrange(t.dim())
    return t.narrow(d, 0, 1).expand(t.shape)


def overlapping(draw: Draw, t: torch.Tensor) -> Any:
    if t.dim() == 0 or 0 in t.shape:
        return SAME
    strides = [draw.rng.randint(0, 3) for _ in t.shape]
    need = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    return t.flatten().repeat(1 + need // t.numel()).as_strided(t.shape, strides)


def extreme(draw: Draw, t: torch.Tensor) -> Any:
    t = t.clone()
    if not t.numel():
        return SAME
    if t.is_floating_point():
        at = torch.randint(0, t.numel(), (draw.rng.randint(1, 3),), generator=draw.generator)
        value = draw.pick((NAN, NAN, NAN, INF, -INF, 1e38, -6e4, 1e-40, -0.0))
        t.view(-1)[at] = torch.tensor(value, dtype=torch.float64).to(t.dtype)
    elif t.dtype == torch.bool:
        return ~t
    else:
        limits = torch.iinfo(t.dtype)
        at = draw.rng.randrange(t.numel())
        t.view(-1)[at] = draw.pick((-1, 1, 10**6, limits.max, limits.min, limits.max - 1))
    return t


# --- what has to be refused, or to work


def other_dtype(draw: Draw, t: torch.Tensor) -> Any:
    others = (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn)
    return t.to(draw.pick([*FLOATS, *others]))


def other_rank(draw: Draw, t: torch.Tensor) -> Any:
    if t.dim() and draw.chance(0.5):
        return t.flatten(0, 1) if t.dim() > 1 and draw.chance(0.5) else t[:1].squeeze(0)
    return t.unsqueeze(draw.rng.randint(0, t.dim()))


def other_size(draw: Draw, t: torch.Tensor) -> Any:
    if t.dim() == 0:
        return SAME
    d = draw.rng.randrange(t.dim())
    size = draw.pick((0, 1, t.shape[d] - 1, t.shape[d] + 1, 2 * t.shape[d]))
    size = max(size, 0)
    if t.shape[d] == 0:
        shape = list(t.shape)
        shape[d] = size
        return t.new_zeros(shape)
    return t.index_select(d, torch.arange(size) % t.shape[d])


def huge(draw: Draw, t: torch.Tensor) -> Any:
    """Returns an expanded view with more elements than fit into memory, without allocating them."""
    if t.dim() == 0 or 0 in t.shape:
        return SAME
    shape = list(t.shape)
    d = draw.rng.randrange(t.dim())
    shape[d] = draw.pick(HUGE)
    return t.new_zeros([1] * t.dim()).expand(shape)


def freed(draw: Draw, t: torch.Tensor) -> Any:
    if not t.numel():
        return SAME
    t = t.clone()
    storage = t.untyped_storage()
    # Public functions check for freed storage, the ops for storage that has shrunk.
    storage.resize_(storage.nbytes() // 2 if draw.raw and draw.chance(0.4) else 0)
    return t


def other_layout(draw: Draw, t: torch.Tensor) -> Any:
    kind = draw.pick(("sparse", "csr", "mkldnn", "meta", "nested", "jagged", "bsr"))
    if kind == "sparse":
        return t.to_sparse()
    if kind == "meta":
        return t.to("meta")
    if kind == "mkldnn":
        return t.float().to_mkldnn() if t.dim() else SAME
    if t.dim() < 2 or 0 in t.shape:
        return SAME
    if kind in ("csr", "bsr"):
        t = t.flatten(1)
        return t.to_sparse_csr() if kind == "csr" else t.to_sparse_bsr((1, 1))
    layout = torch.jagged if kind == "jagged" else torch.strided
    return torch.nested.nested_tensor(list(t.unbind()), layout=layout)


def quantised(draw: Draw, t: torch.Tensor) -> Any:
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8) if t.numel() else SAME


def anything(draw: Draw, value: Any) -> Any:
    choices: list[Any] = [None, 0, 1, -1, 3.5, NAN, 10**400, 2**63, True, "x", "", b"x", [], (), {}]
    choices += [[1.0], object(), int, torch.float32, np.zeros(3), np.float64(2), 1 + 2j, {"x": 1}]
    choices += [[None, None], torch.zeros(()), torch.tensor(1), torch.device("cpu")]
    choices += [lambda *a: a, range(3), Ellipsis]
    return draw.pick(choices)


def as_numpy(draw: Draw, t: torch.Tensor) -> Any:
    return t.float().numpy() if draw.chance(0.5) else t.float().tolist()


SAME_VALUES: list[Fault] = 2 * [transposed, sliced, every_second, misaligned]
SAME_VALUES += [negated, imaginary, parameter, requires_grad, of_inference]
OTHER_VALUES: list[Fault] = [expanded, overlapping, extreme, extreme]
HOSTILE: list[Fault] = [other_dtype, other_rank, other_size, huge, freed, other_layout, quantised]
HOSTILE += [as_numpy, anything]


def other_number(draw: Draw, value: Any) -> Any:
    return draw.pick(
        (-1, 0, 1, 2, -0.5, 1e30, float("inf"), float("nan"), 10**400, 2**63, 2**31, value)
    )


def other_text(draw: Draw, value: str) -> Any:
    return draw.pick((value.upper(), value + " ", "", "cuda", "meta", "reference", value.encode()))


def other_sequence(draw: Draw, value: Any) -> Any:
    items = list(value)
    change = draw.rng.randrange(5)
    if change == 0 or not items:
        return items[:-1]
    if change == 1:
        return (*items, items[-1])
    if change == 2:
        return iter(items)
    if change == 3:
        return tuple(reversed(items))
    return items if isinstance(value, tuple) else tuple(items)


def fault_of(draw: Draw, value: Any) -> tuple[str, Any]:
    """Draws a fault that fits the value's type; returns its name and the changed value."""
    fault: Fault = anything
    if isinstance(value, torch.Tensor) and (not is_readable(value) or value.numel() > MOST):
        return fault.__name__, SAME
    if isinstance(value, torch.Tensor):
        kinds = (SAME_VALUES, OTHER_VALUES, HOSTILE)
        fault = draw.pick(draw.pick(kinds))
    elif draw.chance(0.7):
        if isinstance(value, str):
            fault = other_text
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            fault = other_number
        elif isinstance(value, (tuple, list)):
            fault = other_sequence
    try:
        return fault.__name__, fault(draw, value)
    except Exception:  # such as for a value that an earlier fault changed
        return fault.__name__, SAME


def spoil(draw: Draw, call: dict[str, Any], names: list[str]) -> list[str]:
    """Applies random faults to `call` in place; returns texts such as "x sliced". A third has
    none."""
    done = []
    for _ in range(draw.pick((0, 0, 1, 1, 2, 3))):
        given = [n for n in names if isinstance(call.get(n), (torch.Tensor, tuple, list))]
        name = draw.pick(given if given and draw.chance(0.7) else names)
        if f"{name} anything" in done:
            continue
        value = call.get(name)
        if isinstance(value, (tuple, list)) and len(value) and draw.chance(0.7):
            k = draw.rng.randrange(len(value))
            fault, changed = fault_of(draw, value[k])
            if changed is SAME:
                continue
            items = [changed if j == k else v for j, v in enumerate(value)]
            named = getattr(type(value), "_make", type(value))
            call[name], name = named(items), f"{name}[{k}]"
        else:
            fault, changed = fault_of(draw, value)
            if changed is SAME:
                continue
            call[name] = changed
        done.append(f"{name} {fault}")
    if draw.chance(0.15):
        done.append(draw.pick((shared, neighbours))(draw, call))
    return [what for what in done if what]
