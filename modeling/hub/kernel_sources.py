"""Gets a kernel's module from where it is: a build on this machine, an installed wheel, or the Hub."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkout import build_of_checkout
from .download import FilesDiffer, FilesUnavailable
from .installed import NotInstalled, find_installed
from .kernel_files import read_verified, verified_files
from .kernel_import import import_package, imported_package
from .kernel_variants import choose_variant, explain
from .lock_format import read_file


class KernelError(RuntimeError):
    """A kernel could not be loaded."""


class KernelUnavailable(KernelError):
    """No kernel runs on this machine, or it cannot be fetched now; "auto" then uses the
    reference."""


class KernelCorrupt(KernelError):
    """A file's digest does not match the lock: nothing is imported, and "auto" does not fall
    back."""


@dataclass(frozen=True)
class KernelInfo:
    """Describes where a loaded kernel came from."""

    name: str
    source: str  # "local" (a build on this machine), "installed" (by pip), "hub" or "reference"
    backend: str  # "cpu", "cuda" or "reference"
    repo: str
    revision: str | None = None
    variant: str | None = None
    path: Path | None = None
    reason: str | None = None  # why "auto" chose the reference
    distribution: str | None = None  # the wheel that brought an installed kernel

    def __str__(self) -> str:
        if self.source == "reference":
            return f"{self.name}: torch reference" + (f", {self.reason}" if self.reason else "")
        origin = {
            "hub": f"{self.repo}@{self.revision}",
            "installed": f"the wheel {self.distribution}",
        }.get(self.source, "a build here")
        return f"{self.name}: {self.variant} from {origin}, {self.path}"


def from_disk(name: str, repo: str, device_type: str) -> tuple[Any, KernelInfo] | None:
    """Loads the build that LOCAL_KERNELS names, or that of this checkout; returns None if there is
    none. A build that LOCAL_KERNELS names must fit this machine."""
    named = os.environ.get("LOCAL_KERNELS")
    root = build_of_checkout(name) if named is None else _named_build(named, repo)
    if root is None:
        return None
    files = [f for at in ("", "*/", "build/*/") for f in root.glob(f"{at}metadata.json")]
    with _explained(f"the metadata of the builds in {root} cannot be read", KernelError):
        metadata = {f.resolve().parent: json.loads(read_file(f)) for f in files}
        archs = {p.name: m["backend"].get("archs", []) for p, m in metadata.items()}
    variant = choose_variant(archs, device_type)
    if variant is None:
        if named is None:
            return None
        raise KernelError(f"LOCAL_KERNELS: {root} does not fit: {explain(archs, device_type)}")
    path = next(p for p in metadata if p.name == variant)
    module = _import_from(path, metadata[path]["id"])
    return module, KernelInfo(name, "local", device_type, repo, variant=variant, path=path)


def _named_build(entries: str, repo: str) -> Path | None:
    """Returns the directory that LOCAL_KERNELS, "org/name=/directory:...", gives for `repo`."""
    found = []
    for entry in filter(None, entries.split(":")):
        name, _, directory = entry.partition("=")
        if not name or not directory:
            raise KernelError(f"LOCAL_KERNELS has {entry!r}, but must be org/name=/directory:...")
        if name == repo:
            found.append(Path(directory))
        elif name.strip().lower().replace("_", "-") == repo:
            raise KernelError(f"LOCAL_KERNELS names {name!r}, but must name {repo}")
    if len(found) > 1:
        raise KernelError(f"LOCAL_KERNELS names {repo} {len(found)} times, but must name it once")
    if found and not found[0].is_dir():
        problem = "is no directory" if found[0].exists() else "does not exist"
        raise KernelError(f"LOCAL_KERNELS gives {found[0]} for {repo}, but it {problem}")
    return found[0] if found else None


def _import_from(path: Path, identifier: str) -> Any:
    """Imports a developer's build from its folder, where debuggers and profilers find its
    symbols."""
    module = _loaded(identifier, path, None)
    if module is None:
        spec: Any = importlib.util.spec_from_file_location(identifier, path / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[identifier] = module
        with _explained(f"{path} cannot be imported", KernelError):
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[identifier]
                raise
    return module


def from_wheel_or_hub(
    name: str, locked: dict[str, Any], device_type: str, pinned: bool
) -> tuple[Any, KernelInfo]:
    """Loads what pip installed, else the Hub's. `pinned`: the user's own lock says what to load."""
    reason = ""
    if not pinned:
        try:
            return _from_wheel(name, locked["repo"], device_type)
        except NotInstalled as error:
            reason = str(error)
    try:
        return _from_hub(name, locked, device_type)
    except KernelUnavailable as error:
        raise KernelUnavailable(f"{reason}; {error}" if reason else str(error)) from error


def _from_wheel(name: str, repo: str, device_type: str) -> tuple[Any, KernelInfo]:
    try:
        found = find_installed(name, device_type)
    except FilesDiffer as error:
        raise KernelCorrupt(str(error)) from error
    module = _verified_module(found.id, found.path, found.contents, found.digests)
    variant, path = found.variant, found.path
    info = KernelInfo(name, "installed", device_type, repo, variant=variant, path=path)
    return module, replace(info, distribution=found.distribution)


def _from_hub(name: str, locked: dict[str, Any], device_type: str) -> tuple[Any, KernelInfo]:
    repo, revision, variants = locked["repo"], locked["revision"], locked["variants"]
    if revision is None:
        raise KernelUnavailable(
            f"the lock says that {repo} is unpublished, and no build of it for {device_type} was found "
            f"(in a checkout scripts/build_kernels makes one, elsewhere LOCAL_KERNELS={repo}=/directory "
            "names one)"
        )
    archs = {variant: entry["archs"] for variant, entry in variants.items()}
    variant = choose_variant(archs, device_type)
    if variant is None:
        raise KernelUnavailable(f"{repo}@{revision} does not fit: {explain(archs, device_type)}")
    identifier, files = variants[variant]["id"], variants[variant]["files"]
    try:
        path, contents = verified_files(repo, revision, variant, files)
    except FilesUnavailable as error:
        raise KernelUnavailable(str(error)) from error
    except FilesDiffer as error:
        raise KernelCorrupt(str(error)) from error
    found = json.loads(contents["metadata.json"]).get("id")
    if found != identifier:
        raise KernelCorrupt(f"{path}/metadata.json has id {found!r}, expected {identifier!r}")
    module = _verified_module(identifier, path, contents, files)
    return module, KernelInfo(name, "hub", device_type, repo, revision, variant, path)


def _verified_module(
    identifier: str, path: Path, contents: dict[str, bytes], digests: dict[str, str]
) -> Any:
    """Imports a variant from bytes that were verified, unless it is imported already."""
    module = _loaded(identifier, path, digests)
    if module is None:
        with _explained(f"{path} cannot be imported", KernelUnavailable):
            module = import_package(identifier, contents, path, digests)
    return module


def _loaded(identifier: str, path: Path, files: dict[str, str] | None) -> Any:
    """Returns the module if this process has imported it, because ops cannot be registered twice.

    `files` are its pinned digests, None for a developer's build."""
    module, digests = imported_package(identifier)
    if module is None or (files is not None and digests == files):
        return module
    origin, wrong = Path(module.__file__ or "").parent, None
    if digests is not None:
        wrong = "from other files of that name"
    elif files is None:
        wrong = f"from {origin}, not {path}" if origin.resolve() != path.resolve() else None
    else:  # the user imported it, with `kernels`
        try:
            absent = files.keys() - read_verified(origin, files)
            wrong = f"without {', '.join(sorted(absent))}" if absent else None
        except (FilesDiffer, FilesUnavailable) as error:
            wrong = f"from {origin}: {error}"
    if wrong is not None:
        raise KernelCorrupt(f"{identifier} was imported {wrong}")
    return module


@contextmanager
def _explained(what: str, kind: type[KernelError]) -> Iterator[None]:
    """Turns any exception in the block into an error of class `kind`; imports may raise
    anything."""
    try:
        yield
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise kind(f"{what} ({type(error).__name__}: {first})") from error
