"""What wheels hold besides the package: kernels, the lock that pins them, and commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib
    import tomli as tomllib

from tooling.builder import Kernel, read_kernel
from tooling.finished import (
    UNIVERSAL,
    UnfitVariant,
    Variant,
    folders,
    machine_of,
    read_variant,
)

ROOT = Path(__file__).resolve().parents[2]
PINS = (
    "scripts/wheels/pins.py"  # in a source archive: the variants of its release for other devices
)
# The commands of `flashcell`, below scripts/, with all that they import; not the project's own tools.
COMMANDS = (
    *("train", "evaluate", "export_model"),
    *("tooling/__init__.py", "tooling/arguments.py", "tooling/environment.py"),
    *(
        "tooling/processes.py",
        "tooling/progress.py",
        "training/*.py",
        "evaluation/*.py",
        "evaluation/tasks/*",
    ),
    "recipes/*.yaml",
)
CARDS = "model_cards/TEMPLATE*.md"  # what a trained model's page is made from
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|mailto:|#)[^)]*\)")


def wheel_tag(machine: str) -> str:
    return f"py3-none-manylinux_2_28_{machine}"


def project() -> dict[str, Any]:
    """Returns the [project] table, which wheels of CUDA kernels share in part."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock_format() -> ModuleType:
    """Returns the package's module of that name; the package itself needs torch."""
    spec = importlib.util.spec_from_file_location(
        "lock_format", ROOT / "modeling/hub/lock_format.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, bytes]:
    """Returns the files of the commands, by their places in the wheel."""
    scripts = [file for pattern in COMMANDS for file in (ROOT / "scripts").glob(pattern)]
    files = [file for file in (*scripts, *ROOT.glob(CARDS)) if file.is_file()]
    return {f"flashcell/{file.relative_to(ROOT).as_posix()}": file.read_bytes() for file in files}


def finished(
    builds: Path, torch_include: Path, machine: str, needed: str = "-cpu-"
) -> dict[str, tuple[Kernel, list[Variant]]]:
    """Returns the finished variants of every kernel of this tree, in `builds`/<kernel>/build.

    An unfit variant, such as one of other sources, is an error if it is for `machine` and has
    `needed` in its name; otherwise it is left out, and a line says so."""
    found = {}
    for file in sorted((ROOT / "kernel_builds").glob("*/build.toml")):
        kernel, variants = read_kernel(file.parent), []
        for folder in folders(builds / kernel.name / "build"):
            try:
                if folder.name != UNIVERSAL:
                    variants.append(read_variant(kernel, folder, torch_include))
            except UnfitVariant as error:
                if needed in folder.name and machine_of(folder.name) == machine:
                    raise
                print(f"left out: {error}", flush=True)
        found[kernel.name] = kernel, variants
    return found


def lock_of(found: dict[str, tuple[Kernel, list[Variant]]]) -> dict:
    """Returns the lock of all variants that were found, and of those that this source pins."""
    pins = ROOT / PINS
    pinned = lock_format().read_lock(pins)["kernels"] if pins.is_file() else {}
    kernels = {}
    for name, (kernel, variants) in found.items():
        before = pinned.get(name, {}).get("variants", {})
        own = {variant.name: variant.locked() for variant in variants}
        kernels[name] = {
            "repo": kernel.repo_id,
            "version": kernel.version,
            "revision": None,
            "variants": dict(sorted((before | own).items())),
        }
    return {"format": 1, "kernels": kernels}


def lock_text(lock: dict, only: str = "") -> bytes:
    """Returns the lock's file; `only` the variants that are for a backend."""
    module = lock_format()
    kernels = {
        name: entry | {"variants": {v: e for v, e in entry["variants"].items() if f"-{only}" in v}}
        for name, entry in lock["kernels"].items()
    }
    return module.lock_source(lock | {"kernels": kernels}, "lock.py", module.INSTALLED)


def kernels_of(
    found: dict[str, tuple[Kernel, list[Variant]]], backend: str, machine: str, place: str
) -> dict[str, bytes]:
    """Returns the files of all variants for a backend (cpu, cu130) and a machine, below the folder
    `place`."""
    files = {}
    for name, (_, variants) in found.items():
        mine = [v for v in variants if f"-{backend}" in v.name and v.machine == machine]
        if not mine:
            what = f"{backend} on {machine}"
            raise UnfitVariant(f"{name} has no finished variant for {what}: build it first")
        for variant in mine:
            for path, file in variant.files.items():
                files[f"{place}/{name}/{variant.name}/{path}"] = file.read_bytes()
    return files


def for_an_index(metadata: bytes) -> bytes:
    """Returns METADATA whose page has no links into the repository, which an index does not have."""
    head, separator, page = metadata.decode().partition("\n\n")
    lines = [LINK.sub(lambda m: "" if m[1] else m[2], line) for line in page.splitlines()]
    return (head + separator + "".join(f"{line}\n" for line in lines)).encode()
