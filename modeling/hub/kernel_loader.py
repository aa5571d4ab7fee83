"""Loads a kernel: load_kernel(name, device_type, backend) -> the kernel's module.

    auto        one variant for the device: a build on this machine, else from the Hub at the
                locked revision, else the torch reference, with one warning that names the reason
    cuda, cpu   the same variant, or KernelUnavailable: a backend asked for by name never falls back
    reference   the torch reference

The lock (kernels_lock.py, or the file that FLASHCELL_LOCK names) pins a commit and the sha256 of
every file of every variant. All of them are verified before the first is imported, and the bytes
that were hashed are the bytes that are imported (kernel_files.py, kernel_import.py): an attacker
who can write to the cache can withhold a kernel, but not change it. What the lock pins was
reviewed, so the user need not trust a publisher; `kernels.get_kernel` asks for that trust, because
it imports whatever the repository holds today. Verified files in the cache are used without network
access, so a second start works offline. A Hub that does not answer is given up after 20 seconds.

A checkout uses what scripts/build_kernels has built in it. LOCAL_KERNELS="org/name=/directory:..."
names other builds, and where it or FLASHCELL_LOCK is set, those of the checkout are not used. Builds
are the developer's own: their digests are not checked.
"""

import importlib.util
import json
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkout import build_of_checkout
from .download import FilesDiffer, FilesUnavailable
from .kernel_files import read_verified, verified_files
from .kernel_import import import_package, imported_package
from .kernel_variants import choose_variant, explain
from .kernels_lock import LOCK
from .lock_format import check_lock, read_file, read_lock

BACKENDS = ("auto", "cuda", "cpu", "reference")

logger = logging.getLogger(__name__)


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    return backend


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
    source: str  # "hub", "local" (a build on this machine) or "reference"
    backend: str  # "cpu", "cuda" or "reference"
    repo: str
    revision: str | None = None
    variant: str | None = None
    path: Path | None = None
    reason: str | None = None  # why "auto" chose the reference

    def __str__(self) -> str:
        if self.source == "reference":
            return f"{self.name}: torch reference" + (f", {self.reason}" if self.reason else "")
        origin = f"{self.repo}@{self.revision}" if self.source == "hub" else "a build here"
        return f"{self.name}: {self.variant} from {origin}, {self.path}"


_infos: dict[str, KernelInfo] = {}
_modules = types.ModuleType("loaded_kernels")  # Dynamo traces attributes of modules at no cost
_warned: set[tuple[str, str, str]] = set()
_one_thread = threading.RLock()
if hasattr(os, "register_at_fork"):  # a fork must not copy a half-done load
    os.register_at_fork(
        before=_one_thread.acquire,
        after_in_parent=_one_thread.release,
        after_in_child=_one_thread.release,
    )


def load_kernel(
    name: str,
    device_type: str,
    backend: str = "auto",
    fallback: str = "the torch reference, which is slow",
) -> Any:
    """Returns the module with the ops (lstm, gru, ...) for tensors on `device_type`; loads it once.

    Call it in forward: under torch.compile(fullgraph=True) the kernel is loaded while Dynamo
    traces, and only the ops end up in the graph. `fallback` is what the caller runs instead if
    "auto" finds no kernel: the warning names it.
    """
    return getattr(_modules, _load_once(name, device_type, backend, fallback))


def kernel_info(name: str, device_type: str = "cpu", backend: str = "auto") -> KernelInfo:
    """Returns where the module of load_kernel(name, device_type, backend) came from, without
    warning."""
    return _infos[_load_once(name, device_type, backend, None)]


def _load_once(name: str, device_type: str, backend: str, fallback: str | None) -> str:
    """Loads a kernel if needed and returns its key, a string, which Dynamo needs no guard for."""
    key = f"{name} {device_type} {backend}"
    if key not in _infos:
        with _one_thread:
            if key not in _infos:
                module, info = _load(name, device_type, backend)
                setattr(_modules, key, module)
                _infos[key] = info
                logger.info("%s", info)
    reason = _infos[key].reason
    if reason is not None and fallback is not None:
        warning = (name, fallback, reason)
        with _one_thread:
            is_new = warning not in _warned
            _warned.add(warning)
        if is_new:
            text = f"{name} runs as {fallback}, because {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    return key


# torch.compiler.assume_constant_result, which imports Dynamo (a second) before it does this.
_load_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load(name: str, device_type: str, backend: str) -> tuple[Any, KernelInfo]:
    check_backend(backend)
    if torch.device(device_type).type != device_type:  # "cuda:0" would find no kernel
        raise ValueError(f"device_type is {device_type!r}, but must be a type such as 'cuda'")
    if backend not in ("auto", "reference", device_type):
        raise ValueError(f"backend is {backend!r}, but the tensors are on {device_type!r}")
    path = os.environ.get("FLASHCELL_LOCK")
    kernels = (read_lock(Path(path)) if path else check_lock(LOCK, "kernels_lock.py"))["kernels"]
    if name not in kernels:
        raise ValueError(f"kernel is {name!r}, but the lock has {', '.join(kernels) or 'none'}")
    locked, reason = kernels[name], None
    try:
        if backend != "reference" and device_type != "meta":  # meta tensors have nothing to compute
            local = _from_disk(name, locked["repo"], device_type)
            return local or _from_hub(name, locked, device_type)
    except KernelUnavailable as error:
        if backend != "auto":
            raise
        reason = str(error)
    info = KernelInfo(name, "reference", "reference", locked["repo"], reason=reason)
    return _reference(name), info


def _reference(name: str) -> Any:
    if name == "fused-rnn":
        from ..kernels import fused_rnn

        return fused_rnn
    if name == "diagonal-rnn":
        from ..kernels import diagonal_rnn

        return diagonal_rnn
    if name == "tfla":
        from ..kernels import tfla

        return tfla
    raise KernelError(f"{name} has no torch reference in this package")


def _from_disk(name: str, repo: str, device_type: str) -> tuple[Any, KernelInfo] | None:
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
    parts = [e for e in entries.split(":") if e]
    wrong = [e for e in parts if not all(e.partition("="))]
    if wrong:
        raise KernelError(f"LOCAL_KERNELS has {wrong[0]!r}, but must be org/name=/directory:...")
    directory = dict(e.split("=", 1) for e in parts).get(repo)
    return None if directory is None else Path(directory)


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


def _from_hub(name: str, locked: dict[str, Any], device_type: str) -> tuple[Any, KernelInfo]:
    repo, revision, variants = locked["repo"], locked["revision"], locked["variants"]
    if revision is None:
        raise KernelUnavailable(
            f"the lock says that {repo} is unpublished (in a checkout scripts/build_kernels builds "
            f"it, elsewhere LOCAL_KERNELS={repo}=/directory names a build)"
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
    _check_id(contents["metadata.json"], identifier, path)
    module = _loaded(identifier, path, files)
    if module is None:
        with _explained(f"{path} cannot be imported", KernelUnavailable):
            module = import_package(identifier, contents, path, files)
    return module, KernelInfo(name, "hub", device_type, repo, revision, variant, path)


def _check_id(metadata: bytes, identifier: str, path: Path) -> None:
    found = json.loads(metadata).get("id")
    if found != identifier:
        raise KernelCorrupt(f"{path}/metadata.json has id {found!r}, expected {identifier!r}")


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
