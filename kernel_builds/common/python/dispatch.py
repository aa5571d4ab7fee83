"""Selects the backend of a call: a pure function of static facts, so that torch.compile traces
through it.

The kernels share this file.
"""

from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ContextManager, Optional

import torch

# The build writes _ops.py into binary variants only; the wheel and torch-universal have none.
_ops: Any = (
    None if find_spec(f"{__package__}._ops") is None else import_module(f"{__package__}._ops")
)
BACKEND: Optional[str] = getattr(_ops, "BACKEND", None)
ops: Any = getattr(_ops, "ops", None)

BACKENDS = ("auto", "cuda", "cpu", "reference")


def select_backend(
    requested: str, device_type: str, binary: Optional[str], dtype: Optional[torch.dtype] = None
) -> str:
    """Returns the backend for tensors on `device_type`, given the `binary` in this package, if any.

    "auto" takes the binary where it fits the device and the reference elsewhere, which is where fp64
    on CUDA goes. A backend asked for by name is used or refused, never replaced.
    """
    if not isinstance(requested, str) or requested not in BACKENDS:
        raise ValueError(f"backend is {shown(requested)}, but must be one of {', '.join(BACKENDS)}")
    fits = not (device_type == "cuda" and dtype == torch.float64)
    if requested == "auto":
        return binary if binary is not None and binary == device_type and fits else "reference"
    if requested == "reference":
        return requested
    if requested != device_type:
        raise ValueError(
            f"backend is {requested!r}, but the tensors are on {device_type!r}: "
            "move them, or ask for 'auto'"
        )
    if requested != binary:
        raise RuntimeError(
            f"backend {requested!r} was asked for, but this copy of the kernel holds "
            f"{'no binary' if binary is None else f'the {binary!r} binary'}"
        )
    if not fits:
        raise ValueError(
            "x has dtype torch.float64, but backend 'cuda' computes bfloat16, float16 and float32: "
            "ask for 'reference', or for the CPU"
        )
    return requested


def shown(value: object) -> str:
    """Formats a wrong value for a message: a short one as it is, otherwise its type. Tensors are
    not read, because their memory may be gone."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if all(v is None or isinstance(v, (str, bytes, int, float)) for v in parts):
        too_long = any(isinstance(v, int) and abs(v) >= 2**64 for v in parts)
        if not too_long and len(repr(value)) <= 60:
            return repr(value)
    return f"a {type(value).__name__}"


def has_autocast(device_type: str) -> bool:
    """Whether the device type supports autocast; meta does not. While compiling, this is assumed of
    other devices, because Dynamo of torch 2.11 cannot trace torch's own function."""
    if device_type == "meta":
        return False
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)


def without_autocast(device_type: str) -> ContextManager:
    """Returns a context in which products have their operands' dtype."""
    return (
        torch.autocast(device_type, enabled=False) if has_autocast(device_type) else nullcontext()
    )
