"""Writes and checks a folder's manifest of sizes and digests, which is written last.

{"process-0.pt": {"bytes": 1234, "sha256": "ab..."}, ...}
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from flashcell.utils.whole_file import write_file

NAME = "manifest.json"
LARGEST = 2**24  # bytes of a manifest that is read


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_file(path: Path) -> Path:
    """Returns `path` if it is a regular file or does not exist; raises for anything else."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for ever
        raise ValueError(f"{path} is no regular file")
    return path


def describe(path: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else None
        if digest is None:  # Python 3.10 has no file_digest
            digest = hashlib.sha256()
            while part := file.read(2**20):
                digest.update(part)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def write_manifest(folder: Path, files: dict[str, dict] | None = None) -> None:
    """Writes the manifest of `files`, as `describe` returns them, or of all files in the folder."""
    if files is None:
        files = {path.name: describe(path) for path in sorted(folder.iterdir())}
        for name in files:
            sync(folder / name)
    write_file(folder / NAME, json.dumps(files, indent=2).encode())


def find_damage(
    folder: Path, names: Iterable[str] | None = None, only: Iterable[str] | None = None
) -> str | None:
    """Returns how a folder differs from its manifest, or None; it must hold the files `names`.

    `only` limits which of them are read and hashed."""
    if not (folder / NAME).is_file():  # to open a pipe would wait for ever
        return f"{NAME} is not there, or is no file"
    try:
        with open(folder / NAME, "rb") as file:
            files = json.loads(file.read(LARGEST))
        if names is not None and sorted(files) != sorted(names):
            return f"{NAME} lists {sorted(files)!r:.200}, but must list {sorted(names)!r:.200}"
        for name in files if only is None else only:
            wanted = files[name]
            if Path(name).name != name:
                return f"{NAME} lists {name!r}, but must list names of files"
            path = folder / name
            if not path.is_file():
                return f"{name} is not there, or is no file"
            found = {"bytes": path.stat().st_size}
            if found["bytes"] == wanted["bytes"]:
                found = describe(path)
            for what, value in found.items():
                if value != wanted[what]:
                    return f"{name}: {what} is {value}, but must be {wanted[what]}"
    except OSError as error:
        return str(error)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"{NAME} is no manifest: {error!r}"
    return None
