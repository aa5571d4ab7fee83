"""The one file that knows the Hub: load_kernel(name, device_type, backend) -> the kernel's module.

    auto        one variant for the device: from LOCAL_KERNELS, else from the Hub at the locked
                revision, else the torch reference, with one warning that names the reason
    cuda, cpu   the same variant, or KernelUnavailable: a backend asked for by name never falls back
    reference   the torch reference

The lock (kernels_lock.py, or the file that FLASHCELL_LOCK names) pins a commit and the sha256 of
every file of every variant, and nothing is imported before all of them are verified. What the lock
pins was reviewed, so no publisher has to be trusted and nobody is asked to trust one;
`kernels.get_kernel` asks, because it imports whatever the repository holds today. Verified files
in the cache are used without a word to the network, so a second start works offline.

LOCAL_KERNELS="org/name=/directory:..." (development) takes a build from disk instead. Its files are
the developer's own: their digests are not checked.
"""

import importlib
import json
import logging
import os
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import WeakFileLock

from .kernel_variants import choose_variant, explain
from .kernels_lock import LOCK
from .lock_format import check_lock, differences, read_lock

BACKENDS = ("auto", "cuda", "cpu", "reference")

logger = logging.getLogger(__name__)


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    return backend


class KernelError(RuntimeError):
    """A kernel could not be loaded."""


class KernelUnavailable(KernelError):
    """This machine has no kernel, or cannot get it now: what "auto" falls back from."""


class KernelCorrupt(KernelError):
    """Files are not what the lock pins: none was imported, and not even "auto" goes on."""


@dataclass(frozen=True)
class KernelInfo:
    """Where a kernel came from."""

    name: str
    source: str  # "hub", "local" (LOCAL_KERNELS) or "reference"
    backend: str  # "cpu", "cuda" or "reference"
    repo: str
    revision: str | None = None
    variant: str | None = None
    path: Path | None = None
    reason: str | None = None  # why "auto" came to the reference

    def __str__(self) -> str:
        if self.source == "reference":
            return f"{self.name}: torch reference" + (f", {self.reason}" if self.reason else "")
        origin = f"{self.repo}@{self.revision}" if self.source == "hub" else "LOCAL_KERNELS"
        return f"{self.name}: {self.variant} from {origin}, {self.path}"


_infos: dict[str, KernelInfo] = {}
_modules = types.ModuleType("loaded_kernels")  # Dynamo traces attributes of modules at no cost
_warned: set[str] = set()
_one_thread = threading.RLock()


def load_kernel(name: str, device_type: str, backend: str = "auto") -> Any:
    """The module with the ops (lstm, gru, ...) for tensors on `device_type`; loaded once.

    Call it in forward: under torch.compile(fullgraph=True) the kernel is loaded while Dynamo
    traces, and only the ops end up in the graph.
    """
    return getattr(_modules, _load_once(name, device_type, backend))


def kernel_info(name: str, device_type: str = "cpu", backend: str = "auto") -> KernelInfo:
    """Where the module that load_kernel gives for these arguments came from."""
    return _infos[_load_once(name, device_type, backend)]


@torch.compiler.assume_constant_result
def _load_once(name: str, device_type: str, backend: str) -> str:
    """The key of the loaded kernel: a string, the kind of constant that Dynamo needs no guard for."""
    key = f"{name} {device_type} {backend}"
    if key not in _infos:
        with _one_thread:
            if key not in _infos:
                module, info = _load(name, device_type, backend)
                setattr(_modules, key, module)
                _infos[key] = info
                logger.info("%s", info)
    return key


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
    module = _reference(name)
    if reason is not None and reason not in _warned:
        _warned.add(reason)
        text = f"{name} runs as the torch reference, which is slow, because {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return module, KernelInfo(name, "reference", "reference", locked["repo"], reason=reason)


def _reference(name: str) -> Any:
    if name == "fused-rnn":
        from .kernels import fused_rnn

        return fused_rnn
    if name == "diagonal-rnn":
        from .kernels import diagonal_rnn

        return diagonal_rnn
    if name == "tfla":
        from .kernels import tfla

        return tfla
    raise KernelError(f"{name} has no torch reference in this package")


def _from_disk(name: str, repo: str, device_type: str) -> tuple[Any, KernelInfo] | None:
    """The build that LOCAL_KERNELS names, if it does. A developer's wish, so it never falls back."""
    entries = [e for e in os.environ.get("LOCAL_KERNELS", "").split(":") if e]
    wrong = [e for e in entries if not all(e.partition("="))]
    if wrong:
        raise KernelError(f"LOCAL_KERNELS has {wrong[0]!r}, but must be org/name=/directory:...")
    directory = dict(e.split("=", 1) for e in entries).get(repo)
    if directory is None:
        return None
    root = Path(directory)
    files = [f for at in ("", "*/", "build/*/") for f in root.glob(f"{at}metadata.json")]
    metadata = {f.resolve().parent: json.loads(f.read_text()) for f in files}
    archs = {p.name: m["backend"].get("archs", []) for p, m in metadata.items()}
    variant = choose_variant(archs, device_type)
    if variant is None:
        raise KernelError(f"LOCAL_KERNELS: {root} does not fit: {explain(archs, device_type)}")
    path = next(p for p in metadata if p.name == variant)
    module = _import(path, metadata[path]["id"], device_type, files=None)
    return module, KernelInfo(name, "local", device_type, repo, variant=variant, path=path)


def _from_hub(name: str, locked: dict[str, Any], device_type: str) -> tuple[Any, KernelInfo]:
    repo, revision, variants = locked["repo"], locked["revision"], locked["variants"]
    if revision is None:
        raise KernelUnavailable(
            f"the lock says that {repo} is unpublished (scripts/build_kernels builds it, "
            f"LOCAL_KERNELS={repo}=/directory uses it)"
        )
    archs = {variant: entry["archs"] for variant, entry in variants.items()}
    variant = choose_variant(archs, device_type)
    if variant is None:
        raise KernelUnavailable(f"{repo}@{revision} does not fit: {explain(archs, device_type)}")
    files = variants[variant]["files"]
    path = _fetch(repo, revision, variant, files)
    module = _import(path, variants[variant]["id"], device_type, files)
    return module, KernelInfo(name, "hub", device_type, repo, revision, variant, path)


def _fetch(repo: str, revision: str, variant: str, files: dict[str, str]) -> Path:
    """The directory with the variant's files, verified: from the cache, else from the network."""
    locks = Path(constants.HF_HUB_CACHE, ".locks", f"kernels--{repo.replace('/', '--')}")

    def snapshot(local_files_only: bool = False, force_download: bool = False) -> Path:
        folder = snapshot_download(
            repo,
            repo_type="kernel",
            revision=revision,
            allow_patterns=[f"build/{variant}/*"],
            local_files_only=local_files_only,
            force_download=force_download,
        )
        return Path(folder, "build", variant)

    def cached() -> tuple[Path, list[str]] | None:
        try:
            path = snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        complete = all((path / file).exists() for file in files)
        return (path, differences(path, files)) if complete else None

    def downloaded() -> tuple[Path, list[str]]:
        # A file that was cut short raises if the client notices, else it differs: once more, all.
        with suppress(Exception):
            path = snapshot()
            if not differences(path, files):
                return path, []
        path = snapshot(force_download=True)
        return path, differences(path, files)

    found = cached()  # without a lock: a warm cache may be read-only
    if found is None or found[1]:
        with _explained(f"{repo}@{revision} is not in the cache and cannot be fetched"):
            if found is None:
                _ask_for(repo, revision, f"build/{variant}/metadata.json")
            locks.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(locks / f"{revision}-{variant}.lock"):
                found = cached() or downloaded()  # another process may have come first
    path, wrong = found
    if wrong:
        raise KernelCorrupt(
            f"{path} is not what the lock pins and was not imported: {'; '.join(wrong)}. If it was "
            "damaged here, delete that directory and try again; if not, ask who published it"
        )
    return path


def _ask_for(repo: str, revision: str, file: str) -> None:
    """Raises at once if there is no Hub. snapshot_download would try for half a minute, and here
    the processes would do so one after the other. An answer, even a bad one, is left to it."""
    with suppress(HfHubHTTPError):
        get_hf_file_metadata(hf_hub_url(repo, file, repo_type="kernel", revision=revision))


def _import(path: Path, identifier: str, device_type: str, files: dict[str, str] | None) -> Any:
    """The variant's module. `files` is None for a developer's build."""
    found = json.loads((path / "metadata.json").read_text()).get("id")
    if found != identifier:
        raise KernelCorrupt(f"{path}/metadata.json has id {found!r}, expected {identifier!r}")
    loaded = sys.modules.get(identifier)
    if loaded is not None:
        # Importing it again from here would mix it with the submodules that are loaded already.
        origin = Path(loaded.__file__ or "").parent
        wrong = differences(origin, files) if files is not None else []
        if wrong or (files is None and origin.resolve() != path.resolve()):
            raise KernelCorrupt(f"{identifier} was imported from {origin}, not {path}: {wrong}")
        return loaded
    error = KernelUnavailable if files is not None else KernelError
    with _explained(f"{path} cannot be imported", error):
        # By name: transformers refuses remote code whose imports, even in functions, are not here.
        get_local_kernel = importlib.import_module("kernels").get_local_kernel
        with _no_bytecode() if files is not None else nullcontext():
            return get_local_kernel(path, backend=device_type)


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Imports compile the verified sources: __pycache__ beside them is neither read nor written."""
    before = sys.dont_write_bytecode, sys.pycache_prefix
    with tempfile.TemporaryDirectory() as empty:
        sys.dont_write_bytecode, sys.pycache_prefix = True, empty
        try:
            yield
        finally:
            sys.dont_write_bytecode, sys.pycache_prefix = before


@contextmanager
def _explained(what: str, kind: type[KernelError] = KernelUnavailable) -> Iterator[None]:
    """Any error becomes one of ours, for imports raise anything, and the Hub's client raises
    OSErrors and those of its HTTP library, which is not the same in all its versions."""
    try:
        yield
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise kind(f"{what} ({type(error).__name__}: {first})") from error
