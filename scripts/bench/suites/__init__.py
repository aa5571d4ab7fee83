"""What bench_ops times of each kernel: cases, providers, and lower bounds of their times."""

from importlib import import_module
from types import ModuleType


def cases_of(kernel: str) -> ModuleType:
    """What is timed of a kernel on the CPU."""
    return import_module(f"{__name__}.{kernel.replace('-', '_')}.cases")
