"""Turns a checked and stripped library into a complete variant for the Hub, unless it is up to
date.

A variant directory is a flat Python package: the files of torch-ext/<name>/, and for a binary the
library, _ops.py that loads it, and metadata.json with the digest of every file.

    variant.py KERNEL_DIR --backend cpu|cuda --library FILE --id ID --name DIR --out DIR [--archs A]
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import shutil
from pathlib import Path

from build_toml import BUILDER, BuildError, Kernel, read_kernel

# The first kernels release that reads these files, as kernel-builder writes it.
KERNELS_MINVER = "0.14.0"
METADATA = "metadata.json"
SIGNATURE = "metadata.json.sigstore"  # of the metadata, which holds the digests of the rest


def assemble(
    kernel: Kernel,
    backend: str,
    name: str,
    out: Path,
    library: Path | None = None,
    archs: tuple[str, ...] = (),
    expected_id: str | None = None,
) -> Path:
    """Writes `out`/`name` in a directory beside it, then puts it in place of an older one."""
    kernel_id = kernel.id(backend)
    if expected_id not in (None, kernel_id):
        raise BuildError(f"{kernel.name}: its sources changed during the build; build it again")
    _remove_leftovers(out, name)
    staging = out / f".{name}.{os.getpid()}"
    staging.mkdir(parents=True)
    try:
        _copy_package(kernel, staging)
        if library is not None:
            shutil.copyfile(library, staging / f"{kernel_id}.abi3.so")
            template = (BUILDER / "_ops.py.in").read_text()
            text = template.replace("@KERNEL_ID@", kernel_id).replace("@KERNEL_BACKEND@", backend)
            (staging / "_ops.py").write_text(text)
        _write_metadata(kernel, backend, kernel_id, archs, staging)
        _replace(staging, out / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out / name


def is_up_to_date(variant: Path, kernel_id: str, archs: tuple[str, ...]) -> bool:
    """Whether the variant was built from these sources for these archs, and is unchanged since."""
    try:
        metadata = json.loads((variant / METADATA).read_text())
        built = (metadata["id"], tuple(metadata["backend"].get("archs", ())))
        return built == (kernel_id, archs) and metadata["digest"]["files"] == digests(variant)
    except (OSError, ValueError, KeyError):
        return False


def digests(variant: Path) -> dict[str, str]:
    """Returns the sha256 of every file, as kernels' Digest.hash_variant computes it, without
    importing it."""
    files = [f for f in sorted(variant.rglob("*")) if f.is_file()]
    own = (variant / METADATA, variant / SIGNATURE)
    return {
        file.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(file.read_bytes()).digest()
        ).decode()
        for file in files
        if file not in own and file.suffix != ".pyc"
    }


def render_card(kernel: Kernel, out: Path) -> None:
    """Renders CARD.md with the variables of kernel-builder's card templates, and writes it to
    `out`/CARD.md."""
    from jinja2 import Environment, StrictUndefined, UndefinedError

    card = kernel.root / "CARD.md"
    if not card.is_file():
        raise BuildError(f"{kernel.name}: {card} is missing, but every Hub repository has a card")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        text = environment.from_string(card.read_text()).render(
            repo_id=kernel.repo_id,
            version=kernel.version,
            license=kernel.license,
            functions=_public_names(kernel.package / "__init__.py"),
            layers=_public_names(kernel.package / "layers.py"),
            has_benchmark=(kernel.root / "benchmarks" / "benchmark.py").is_file(),
            upstream=kernel.upstream,
            source=kernel.source,
        )
    except UndefinedError as error:
        raise BuildError(f"{card}: {error}; a card knows what kernel-builder gives it") from None
    out.mkdir(parents=True, exist_ok=True)
    (out / "CARD.md").write_text(text)


def _copy_package(kernel: Kernel, staging: Path) -> None:
    for file in sorted(kernel.package.rglob("*")):
        if file.suffix.lstrip(".") in kernel.python_extensions and file.is_file():
            target = staging / file.relative_to(kernel.package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    if (staging / "_ops.py").exists():
        raise BuildError(f"{kernel.package}/_ops.py exists, but the build generates it: remove it")


def _write_metadata(
    kernel: Kernel, backend: str, kernel_id: str, archs: tuple[str, ...], variant: Path
) -> None:
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    metadata = {
        "name": kernel.name,
        "id": kernel_id,
        "version": kernel.version,
        "kernels-minver": KERNELS_MINVER,
        "license": kernel.license,
        "upstream": kernel.upstream,
        "source": kernel.source,
        "python-depends": [],
        # The format has no name for "any device". Only a loader's arch check reads this.
        "backend": {"type": "cpu" if backend == "universal" else backend},
    }
    if archs:
        metadata["backend"]["archs"] = list(archs)
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))}
    text = json.dumps({k: v for k, v in metadata.items() if v is not None}, indent=2) + "\n"
    Metadata.from_bytes(text.encode())  # the loader's own parser agrees, or raises
    (variant / METADATA).write_text(text)


def _remove_leftovers(out: Path, name: str) -> None:
    """Removes what killed builds, whose process is in the name, have left beside the variants."""
    for folder in out.glob(f".{name}.*"):
        pid = folder.name.removeprefix(f".{name}.").partition(".")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not Path("/proc", pid).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _replace(new: Path, target: Path) -> None:
    """Renames `new` to `target`; an older variant stays whole until then, and on failure."""
    old = new.with_name(new.name + ".old")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _public_names(module: Path) -> list[str]:
    """Returns the names in the module's __all__, read without importing it."""
    if not module.is_file():
        return []
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", type=Path)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--archs", default="")
    args = parser.parse_args()
    archs = tuple(filter(None, args.archs.split(",")))
    try:
        kernel = read_kernel(args.kernel)
        assemble(kernel, args.backend, args.name, args.out, args.library, archs, args.id)
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
