"""flashcell.kernels: the Python of every kernel, which runs its torch reference without a binary."""

from importlib import import_module
from pathlib import Path
from typing import Any

# In a checkout the folders beside this file are kernel projects, found by the editable install and not
# here: Python would take `tfla` for a package without code.
__path__ = [folder for folder in __path__ if not Path(folder, "builder").is_dir()]


def __getattr__(name: str) -> Any:
    if name not in ("diagonal_rnn", "tfla"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
