"""Lists the functions to fuzz: all of `__all__`, so that none is forgotten, and RAW_ONLY."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from fuzzing import (
    calls_diagonal,  # noqa: F401
    calls_fused,  # noqa: F401
    calls_tfla,  # noqa: F401  (each of the three registers its makers)
)
from fuzzing.draw import MAKERS

# Public functions that run no kernel, but change a registry for good.
NO_CALLS = {"register_structure"}
# Functions of a kernel that are not public: only the raw ops that they call are fuzzed.
RAW_ONLY = {"run_layers", "run_step"}


def entries(kernel: ModuleType) -> dict[str, Callable]:
    """Returns the functions of a kernel to fuzz, by name; each has a maker of arguments."""
    found = {n: getattr(kernel, n) for n in kernel.__all__ if n not in NO_CALLS}
    found = {n: f for n, f in found.items() if inspect.isfunction(f)}
    missing = sorted(set(found) - set(MAKERS))
    if missing:
        raise SystemExit(f"scripts/fuzzing/calls.py makes no call of {', '.join(missing)}")
    return found | {n: getattr(kernel, n) for n in sorted(RAW_ONLY) if hasattr(kernel, n)}
