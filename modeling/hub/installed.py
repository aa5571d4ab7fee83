"""Finds the variants that pip has installed, and the lock that pins them.

The lock and the CPU variants come with flashcell's wheel, as flashcell/installed/lock.py and
flashcell/installed/<kernel>/<variant>/. CUDA variants come with wheels of their own, flashcell-cu13
for CUDA 13: flashcell_cu13/<kernel>/<variant>/. flashcell's lock pins these too, so it does not
matter in which folder of the search path they are found, nor who wrote there.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .download import FilesDiffer, FilesUnavailable
from .kernel_files import read_verified
from .kernel_variants import STABLE_VARIANT, choose_variant, explain
from .lock_format import read_file, read_lock


class NotInstalled(Exception):
    """No installed variant can be used; the message says why, or is empty where flashcell did not
    come as a wheel with kernels."""


@dataclass(frozen=True)
class Installed:
    """A variant whose files are what the lock pins."""

    distribution: str  # the wheel that brought it
    variant: str
    id: str
    path: Path
    digests: dict[str, str]  # file -> sha256
    contents: dict[str, bytes]


def distribution_of(variant: str) -> str:
    """Returns the name of the wheel that brings a variant: flashcell, or flashcell-cu13."""
    match = STABLE_VARIANT.fullmatch(variant)
    return f"flashcell-cu{match[4]}" if match and match[4] else "flashcell"


def lock_of_wheel() -> Path | None:
    """Returns the lock that came with this file, or None if this file is in no installed wheel."""
    here = Path(__file__).resolve()
    root = here.parents[1]
    if here != root / "hub/installed.py" or root.name != "flashcell":
        return None
    lock = root / "installed" / "lock.py"
    return lock if lock.is_file() else None


def find_installed(name: str, device_type: str) -> Installed:
    """Returns the best installed variant of a kernel, verified.

    Raises NotInstalled, or FilesDiffer where a file is not what the lock pins."""
    lock = lock_of_wheel()
    if lock is None:
        raise NotInstalled("")
    pinned: dict[str, Any] = read_lock(lock)["kernels"].get(name, {}).get("variants", {})
    places = {variant: _place(lock.parent, name, variant) for variant in pinned}
    archs = {variant: entry["archs"] for variant, entry in pinned.items()}
    variant = choose_variant({v: archs[v] for v, at in places.items() if at}, device_type)
    if variant is None:
        absent = choose_variant({v: archs[v] for v, at in places.items() if not at}, device_type)
        if absent is not None:
            raise NotInstalled(
                f"it comes with another wheel: pip install {distribution_of(absent)}"
            )
        raise NotInstalled(f"no installed {name} fits: {explain(archs, device_type)}")
    path, entry, wheel = places[variant], pinned[variant], distribution_of(variant)
    assert path is not None
    again = f"pip install --force-reinstall --no-deps {wheel}"
    try:
        # Checked first: every file of another release has another digest.
        if (found := _id(path)) != entry["id"]:
            raise NotInstalled(
                f"{path} is {found}, but this flashcell was released with {entry['id']}: "
                + (
                    again
                    if wheel == "flashcell"
                    else f"install {wheel} and flashcell of one version"
                )
            )
        contents = read_verified(path, entry["files"], again)
    except FilesUnavailable as error:
        raise NotInstalled(f"{error} ({again})") from error
    if absent_files := sorted(entry["files"].keys() - contents):
        raise NotInstalled(f"{path} has no {', '.join(absent_files)} ({again})")
    return Installed(wheel, variant, entry["id"], path, entry["files"], contents)


def _place(installed: Path, name: str, variant: str) -> Path | None:
    """Returns the folder of a variant, or None if it is not there."""
    wheel = distribution_of(variant)
    folders = [installed] if wheel == "flashcell" else _folders(wheel.replace("-", "_"))
    return next((at for f in folders if (at := f / name / variant).is_dir()), None)


def _folders(package: str) -> Iterator[Path]:
    """Yields the folders of a top-level package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # another module has this name
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder)


def _id(path: Path) -> str:
    """Returns the id in a variant's metadata, which tells releases apart; nothing trusts it."""
    try:
        metadata = json.loads(read_file(path / "metadata.json"))
    except OSError as error:
        raise FilesUnavailable(f"{path}/metadata.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FilesDiffer(f"{path}/metadata.json is not JSON") from error
    return str(metadata.get("id")) if isinstance(metadata, dict) else "of no known format"
