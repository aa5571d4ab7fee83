"""Reads and writes wheels and source archives. Equal contents give equal bytes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

GENERATOR = "flashcell"
TIME = (1980, 1, 1, 0, 0, 0)  # the oldest that a zip file can name
RECORD, WHEEL = "RECORD", "WHEEL"


def read_wheel(file: Path) -> dict[str, bytes]:
    """Returns name -> content of a wheel's files."""
    with zipfile.ZipFile(file) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}


def dist_info(files: dict[str, bytes]) -> str:
    """Returns the name of the metadata's folder among a wheel's files."""
    (folder,) = {name.split("/")[0] for name in files if name.endswith(".dist-info/METADATA")}
    return folder


def write_wheel(folder: Path, files: dict[str, bytes], tag: str) -> str:
    """Writes a wheel with its WHEEL and RECORD, and returns its name.

    `files` has the metadata; `tag` is what the wheel runs on: py3-none-any."""
    info = dist_info(files)
    pure = "true" if tag.endswith("-any") else "false"
    said = f"Wheel-Version: 1.0\nGenerator: {GENERATOR}\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    files = files | {f"{info}/{WHEEL}": said.encode()}
    files.pop(f"{info}/{RECORD}", None)
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    lines = [*sorted(lines), f"{info}/{RECORD},,"]
    files[f"{info}/{RECORD}"] = "".join(f"{line}\n" for line in lines).encode()
    name = f"{info.removesuffix('.dist-info')}-{tag}.whl"
    partial = folder / f".{name}.partial"
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path in sorted(files, key=lambda path: (path.startswith(info), path)):
            entry = zipfile.ZipInfo(path, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, files[path])
    partial.replace(folder / name)
    return name


def rewrite_sdist(file: Path, more: dict[str, bytes]) -> None:
    """Adds files to a source archive, and forgets who made it and when."""
    entries = {}
    with tarfile.open(file) as old:
        for member in old:
            content = old.extractfile(member)
            if member.isfile() and content is not None:
                entries[member.name] = (content.read(), member.mode)
            elif member.issym():
                entries[member.name] = (member.linkname, member.mode)
    root = next(iter(entries)).split("/")[0]
    entries |= {f"{root}/{name}": (content, 0o644) for name, content in more.items()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for name, (content, mode) in sorted(entries.items()):
            member = tarfile.TarInfo(name)
            member.mode = 0o755 if mode & 0o100 else 0o644
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                new.addfile(member)
            else:
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    partial.replace(file)


def _digest(content: bytes) -> str:
    digest = hashlib.sha256(content).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
