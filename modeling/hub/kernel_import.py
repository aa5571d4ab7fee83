"""Imports a package from bytes: none of its files is opened, so none can be swapped after a check.

Sources are compiled from memory. The dynamic linker takes files only, so a library is written to an
unnamed file of this process, which no other user can open. All modules are imported at once, so
that none is searched for later.
"""

import importlib
import linecache
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import IO

SOURCE, LIBRARY = ".py", ".abi3.so"


def import_package(
    name: str, files: dict[str, bytes], folder: Path, digests: dict[str, str]
) -> ModuleType:
    """Imports the package `name` from `files`, its relative paths and their bytes.

    `folder` is the path that tracebacks and `__file__` show. `digests` are kept with the package,
    for `imported_package` to return."""
    package = _Package(name, files, folder)
    package.digests = digests
    sys.meta_path.insert(0, package)
    try:
        for module in package.modules:
            importlib.import_module(module)
    except BaseException:
        for module, file in package.modules.items():
            if not file.endswith(LIBRARY):  # a library's ops cannot be registered again
                sys.modules.pop(module, None)
        raise
    finally:
        sys.meta_path.remove(package)
    package.content = {p: c for p, c in package.content.items() if not p.endswith(LIBRARY)}
    return sys.modules[name]


class _Package(MetaPathFinder, SourceLoader):  # type: ignore[misc]
    """Finds the modules of one package and loads its sources."""

    digests: dict[str, str]

    def __init__(self, name: str, files: dict[str, bytes], folder: Path):
        self.folder = folder
        self.modules: dict[str, str] = {}  # name -> file
        self.content = {str(folder / file): content for file, content in files.items()}
        for file in sorted(files):
            module = _module_name(name, file)
            if module is not None and self.modules.setdefault(module, file) != file:
                raise ImportError(f"{self.modules[module]} and {file} are both {module}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.modules.get(fullname)
        if file is None:
            return None
        if file.endswith(LIBRARY):
            return ModuleSpec(fullname, _Library(fullname, self.content[str(self.folder / file)]))
        spec = spec_from_loader(fullname, self)
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # no search for modules outside this package
        return spec

    def get_filename(self, fullname: str) -> str:
        return str(self.folder / self.modules[fullname])

    def get_data(self, path: str) -> bytes:
        return self.content[path]

    def exec_module(self, module: ModuleType) -> None:
        path = self.get_filename(module.__name__)
        lines = (self.get_source(module.__name__) or "").splitlines(keepends=True)
        # For tracebacks and inspect. An entry without a time is never compared with the disk.
        linecache.cache[path] = len(self.content[path]), None, lines, path
        super().exec_module(module)


class _Library(ExtensionFileLoader):
    """Loads an extension module from bytes.

    Its file stays open: the linker identifies libraries by path, here /proc/self/fd/<number>, so
    the number must not be reused. Nothing closes it, so a number is kept and no file object."""

    def __init__(self, name: str, content: bytes):
        super().__init__(name, "")
        self.content = content

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        failures = []
        for new_file in (self._in_memory, tempfile.TemporaryFile):
            try:
                with new_file() as file:
                    file.write(self.content)
                    file.flush()
                    number = os.dup(file.fileno())
                self.path = spec.origin = f"/proc/self/fd/{number}"
                module = super().create_module(spec)
            except (OSError, ImportError) as error:
                failures.append(str(error))
            else:
                self.content = b""
                return module
        raise ImportError(f"the library {spec.name} cannot be loaded: {'; '.join(failures)}")

    def _in_memory(self) -> IO[bytes]:
        """Opens a file in memory (memfd), which needs no writable folder; not every system allows
        it."""
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd_create")
        return os.fdopen(os.memfd_create(self.name), "w+b")


def _module_name(package: str, file: str) -> str | None:
    """Returns the dotted module name of a file, or None if it is no module."""
    suffix = next((s for s in (LIBRARY, SOURCE) if file.endswith(s)), None)
    if suffix is None:
        return None
    parts = [package, *file.removesuffix(suffix).split("/")]
    if parts[-1] == "__init__" and suffix == SOURCE:
        parts.pop()
    return ".".join(parts) if all(part.isidentifier() for part in parts) else None


def imported_package(name: str) -> tuple[ModuleType | None, dict[str, str] | None]:
    """Returns the package if it is already imported, and its digests if it came from verified
    bytes.

    It may have been imported by another copy of this file, as every exported model has one. Waits
    while another thread imports it."""
    if name not in sys.modules:
        return None, None
    try:
        module = importlib.import_module(name)
    except ImportError:  # the other thread's import has failed meanwhile
        return None, None
    return module, getattr(module.__spec__ and module.__spec__.loader, "digests", None)
