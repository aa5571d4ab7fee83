"""Loads a kernel: load_kernel(name, device_type, backend) -> the kernel's module.

    auto        one variant for the device: a build on this machine, else what pip installed, else
                from the Hub at the locked revision, else the torch reference, with one warning that
                names the reason
    cuda, cpu   the same variant, or KernelUnavailable: a backend asked for by name never falls back
    reference   the torch reference

The lock (kernels_lock.py, or the file that FLASHCELL_LOCK names) pins a commit and the sha256 of
every file of every variant; a wheel of flashcell carries such a lock for what pip installs
(installed.py). All files are verified before the first is imported, and the bytes that were hashed
are the bytes that are imported (kernel_files.py, kernel_import.py): an attacker who can write to the
cache can withhold a kernel, but not change it. What the lock pins was reviewed, so the user need not
trust a publisher; `kernels.get_kernel` asks for that trust, because it imports whatever the
repository holds today. Verified files in the cache are used without network access, so a second
start works offline. A Hub that does not answer is given up after 20 seconds.

A checkout uses what scripts/build_kernels has built in it. LOCAL_KERNELS="org/name=/directory:..."
names other builds. Where it is set, builds of the checkout are not used; where FLASHCELL_LOCK is
set, neither they nor installed kernels are. Builds are the developer's own: their digests are not
checked.
"""

import logging
import os
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from .kernel_sources import (
    KernelCorrupt,
    KernelError,
    KernelInfo,
    KernelUnavailable,
    from_disk,
    from_wheel_or_hub,
)
from .kernels_lock import LOCK
from .lock_format import check_lock, read_lock

__all__ = [
    "BACKENDS",
    "KernelCorrupt",
    "KernelError",
    "KernelInfo",
    "KernelUnavailable",
    "check_backend",
    "kernel_info",
    "load_kernel",
]

BACKENDS = ("auto", "cuda", "cpu", "reference")

logger = logging.getLogger(__name__)


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    return backend


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
        known = ", ".join(kernels) or "none: the lock is empty"
        raise ValueError(f"name is {name!r}, but must be one of {known}")
    locked, reason = kernels[name], None
    try:
        if backend != "reference" and device_type != "meta":  # meta tensors have nothing to compute
            local = from_disk(name, locked["repo"], device_type)
            return local or from_wheel_or_hub(name, locked, device_type, pinned=bool(path))
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
