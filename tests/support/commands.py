"""Loads commands of scripts/ as modules, and runs them as processes."""

import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS, SUPPORT = ROOT / "scripts", ROOT / "tests/support"


def load_command(name: str) -> ModuleType:
    """Loads scripts/<name> as a module: it has no suffix, so no import finds it."""
    module, path = ModuleType(name), SCRIPTS / name
    module.__file__ = str(path)
    before, sys.modules[name] = sys.dont_write_bytecode, module  # dataclasses look there
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    sys.dont_write_bytecode = before
    return module


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's variables and `variables`, for a Python that imports what pytest does."""
    places = [str(SCRIPTS), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}
