"""Reads the variants that scripts/build_kernels has finished, and refuses those that may not be given
to others. Standard library and the builder only: wheels are built where nothing else is installed."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from tooling.builder import Kernel, abi_check
from tooling.builder import variant as shared

UNIVERSAL = "torch-universal"  # for people without flashcell: never loaded by it, so not locked


class UnfitVariant(Exception):
    """A variant may not be given to others; the message says why."""


@dataclass(frozen=True)
class Variant:
    """A built variant: a directory below build/ that passed every check."""

    name: str
    files: dict[str, Path]
    id: str
    archs: list[str]

    @property
    def cuda(self) -> str:
        return cuda_of(self.name)

    @property
    def machine(self) -> str:
        return machine_of(self.name)

    def locked(self) -> dict:
        sha256 = lambda file: hashlib.sha256(file.read_bytes()).hexdigest()
        files = {path: sha256(file) for path, file in self.files.items()}
        return {"id": self.id, "archs": self.archs, "files": files}


def cuda_of(variant: str) -> str:
    """Returns the version of CUDA that a variant is for, or "" if it is for the CPU."""
    match = re.search(r"-cu(\d+)(\d)-", variant)
    return f"{match[1]}.{match[2]}" if match else ""


def machine_of(variant: str) -> str:
    """Returns the machine that a variant's name ends with: x86_64, or aarch64."""
    return variant.removesuffix("-linux").rpartition("-")[2]


def read_variants(kernel: Kernel, build: Path, torch_include: Path) -> list[Variant]:
    """Reads and checks every variant of a kernel in the folder `build`."""
    found = folders(build)
    if not any(folder.name != UNIVERSAL for folder in found):
        raise UnfitVariant(f"{build} holds no binary variant: run scripts/build_kernels first")
    if not (build / "CARD.md").is_file():
        raise UnfitVariant(f"{build}/CARD.md is missing: run scripts/build_kernels first")
    return [read_variant(kernel, folder, torch_include) for folder in found]


def folders(build: Path) -> list[Path]:
    """Returns the folders of the variants in `build`."""
    return sorted(file.parent for file in build.glob("[!.]*/metadata.json"))


def read_variant(kernel: Kernel, folder: Path, torch_include: Path) -> Variant:
    metadata = json.loads((folder / "metadata.json").read_text())
    backend = "universal" if folder.name == UNIVERSAL else metadata["backend"]["type"]
    expected = {"name": kernel.name, "version": kernel.version, "id": kernel.id(backend)}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise UnfitVariant(
                f"{folder}/metadata.json has {key} {metadata.get(key)!r}, but the sources give "
                f"{value!r}: run scripts/build_kernels again"
            )
    if metadata.get("kernel-depends"):
        raise UnfitVariant(f"{folder} has kernel-depends, which the lock does not pin")
    digests, found = metadata["digest"]["files"], shared.digests(folder)
    wrong = sorted(f for f in {*digests, *found} if digests.get(f) != found.get(f))
    if wrong:
        raise UnfitVariant(
            f"{folder}: {', '.join(wrong)} is not what metadata.json says: "
            "run scripts/build_kernels again"
        )
    archs = metadata["backend"].get("archs", [])
    libraries = [folder / file for file in found if file.endswith(".so")]
    if [file.name for file in libraries] != [f"{metadata['id']}.abi3.so"] * (
        backend != "universal"
    ):
        raise UnfitVariant(f"{folder} must hold one library, {metadata['id']}.abi3.so")
    for library in libraries:
        problems = abi_check.problems(
            library,
            kernel.stable_abi[backend],
            torch_include,
            machine_of(folder.name),
            tuple(archs),
            cuda_of(folder.name),
            stripped=True,
            parts=kernel.parts(tuple(archs)),
        )
        if problems:
            raise UnfitVariant(f"{library} fails the ABI check: {'; '.join(problems)}")
    files = {path: folder / path for path in sorted([*found, "metadata.json"])}
    return Variant(folder.name, files, metadata["id"], archs)
