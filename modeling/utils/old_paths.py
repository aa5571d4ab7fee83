"""Keeps import paths from before the package had folders: flashcell.kernel_loader is the module
flashcell.hub.kernel_loader, imported when it is asked for, and one object under both names."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = __name__.partition(".")[0]
MOVED = {
    "accelerated_xlstm": "integrations.accelerate",
    "batch": "generation.slots",
    "boundaries": "state.boundaries",
    "cache": "state.cache",
    "causal_conv": "layers.causal_conv",
    "context_parallel": "state.context_parallel",
    "decode": "generation.engine",
    "diagonal_mixer": "layers.diagonal_mixer",
    "fingerprint": "generation.fingerprint",
    "flash_rnn_layers": "layers.diagonal_rnn",
    "global_names": "generation.global_names",
    "headwise_linear": "layers.headwise_linear",
    "hub_download": "hub.download",
    "intake": "generation.request_queue",
    "kernel_files": "hub.kernel_files",
    "kernel_import": "hub.kernel_import",
    "kernel_loader": "hub.kernel_loader",
    "kernel_variants": "hub.kernel_variants",
    "kernels_lock": "hub.kernels_lock",
    "lock_format": "hub.lock_format",
    "mlstm": "layers.mlstm",
    "recording": "generation.captured_step",
    "requests": "generation.requests",
    "rnn": "layers.rnn",
    "rnn_classes": "layers.rnn_classes",
    "rnn_replace": "layers.replace",
    "state_file": "state.serialization",
    "step_linear": "layers.decode_linear",
    "tape": "generation.op_tape",
    "xlstm_checkpoint": "convert_xlstm",
    "xlstm_mixers": "layers.xlstm_mixers",
}
# Folders that have the name of an old module. A name that the folder lacks is taken from the module
# that replaced the old one.
FOLDERS = {"generation": "generation.mixin", "layers": "layers.recurrent_mixer"}


class OldPaths(MetaPathFinder, Loader):
    """Import finder that maps `flashcell.<old name>` to the module's new place."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if parent == PACKAGE and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"{PACKAGE}.{MOVED[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has replaced the spec


class OldModule(ModuleType):
    """A package that forwards attributes to the module that had its name, also when patched."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (Path(self.__path__[0]) / f"{name}.py").is_file():
            return import_module(f"{self.__name__}.{name}")
        return getattr(_module_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            before = getattr(self, name)
            setattr(_module_of(self), name, value)
            vars(self).setdefault("__before__", []).append((name, before))

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute of the package, as mock.patch does to undo a patch."""
        values = vars(self).get("__before__", [])
        last = next((i for i in reversed(range(len(values))) if values[i][0] == name), None)
        if last is None:
            super().__delattr__(name)
        else:
            setattr(_module_of(self), *values.pop(last))


def _module_of(folder: ModuleType) -> ModuleType:
    return import_module(f"{PACKAGE}.{FOLDERS[folder.__name__.rpartition('.')[2]]}")


def answer_for_old_module(folder: str) -> None:
    """Turns the package `folder` into an OldModule; called in the `__init__` of each of FOLDERS."""
    sys.modules[folder].__class__ = OldModule


def import_old(name: str) -> ModuleType:
    """Imports `flashcell.<old name>` on attribute access: the package's module-level
    `__getattr__`."""
    if name not in MOVED:
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
    return import_module(f"{PACKAGE}.{name}")


sys.meta_path.append(OldPaths())
