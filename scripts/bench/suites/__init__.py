"""Benchmark cases of each kernel, for bench_ops: shapes, providers, and lower bounds of time."""

from importlib import import_module
from types import ModuleType


def cases_of(kernel: str) -> ModuleType:
    """Returns the module with a kernel's CPU cases."""
    return import_module(f"{__name__}.{kernel.replace('-', '_')}.cases")
