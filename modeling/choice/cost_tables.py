"""Reads the tables of measured costs (cost_model.py), once in a process, at the first decision.

costs.json is this package's table. Before it comes the user's own, which `scripts/tune` writes: the
file $FLASHCELL_TUNED names, or else flashcell/tuned.json in $XDG_CACHE_HOME (~/.cache). One that
cannot be used gives a warning that names it, and counts as absent.
"""

import os
import threading
import warnings
from pathlib import Path
from typing import Any

from .cost_model import LARGEST_FILE, TableError, read_table

Table = list[dict[str, Any]]

COSTS = Path(__file__).resolve().with_name("costs.json")
_tables: list[Table] = []  # the user's and ours, once they are read
_lock = threading.Lock()


def tables() -> list[Table]:
    """Returns the user's own table, which is empty where there is none, and ours."""
    if not _tables:
        _read_tables()
    return _tables


def own_table() -> Path:
    """Returns where the user's own table is read from."""
    named = os.environ.get("FLASHCELL_TUNED")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "flashcell" / "tuned.json"


def _read_tables() -> None:
    """Reads the user's own table and ours; a bad one of the user's counts as absent."""
    own: Table = []
    problem = None
    try:
        own = _read_own()
    except TableError as error:
        problem = str(error)
    with _lock:
        if _tables:
            return
        _tables[:] = [own, read_table(COSTS.read_bytes(), COSTS.name)]
    if problem is not None:
        text = (
            f"{problem}: backend='auto' decides by flashcell's own table (scripts/tune writes one)"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _read_own() -> Table:
    path: Any = os.environ.get("FLASHCELL_TUNED")
    try:
        path = own_table()
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would block
        with open(handle, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError as error:
        if "FLASHCELL_TUNED" not in os.environ:
            return []
        raise TableError(f"{path}, which FLASHCELL_TUNED names, is not there") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise TableError(f"{path} cannot be read ({error})") from error
    return read_table(content, str(path))
