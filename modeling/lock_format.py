"""The kernel lock: what was published and reviewed, and so the only thing that may be loaded.

A lock is a Python file with one dict literal, ``LOCK = {...}``, because exported model repositories
carry it and only their `.py` files are copied. It is read without being executed:

    format    1
    kernels   name -> repo      "org/name" on the Hub
                      version   the branch v<version> it is published on
                      revision  commit of that branch, or None: not published yet
                      variants  directory below build/ -> id     Python module and op namespace
                                                          archs  CUDA archs, [] for the CPU
                                                          files  relative path -> sha256
"""

import ast
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

FORMAT = 1
DOCSTRING = '"""The published kernels that flashcell runs. Written by scripts/publish_kernels."""'
NAME = r"[a-z][-a-z0-9]*[a-z0-9]"
REPO = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
REVISION = r"[0-9a-f]{40}"
VARIANT = r"[a-z0-9][A-Za-z0-9_-]*"
ID = r"_[A-Za-z0-9_]+"
ARCH = r"\d+\.\d[af]?(\+PTX)?"
FILE = r"(?!.*(^|/)\.{0,2}(/|$))[A-Za-z0-9_./-]+"  # relative, and no part is empty, "." or ".."
SHA256 = r"[0-9a-f]{64}"
ALWAYS_THERE = {"__init__.py", "metadata.json"}


class LockError(ValueError):
    """The lock is not one: the message names the field, what it is and what it must be."""


def read_lock(path: Path) -> dict[str, Any]:
    """The checked lock in a file, which is parsed and never executed."""
    try:
        body = ast.parse(path.read_bytes()).body
        found = [s.value for s in body if isinstance(s, ast.Assign) and _assigns_lock(s)]
        lock = [ast.literal_eval(value) for value in found]
    except OSError as error:
        raise LockError(f"kernel lock {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise LockError(f"kernel lock {path} is not LOCK = {{a literal}}: {error}") from error
    if len(lock) != 1:
        raise LockError(f"kernel lock {path} assigns LOCK {len(lock)} times, but must do so once")
    return check_lock(lock[0], str(path))


def write_lock(lock: dict[str, Any], path: Path) -> None:
    """Puts the checked lock in place of an older one: a reader sees one or the other, whole."""
    text = json.dumps(check_lock(lock, str(path)), indent=4).replace(": null", ": None")
    text = re.sub(r'(["\]}e\d])\n', r"\1,\n", text)  # trailing commas, as the formatter wants them
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"{DOCSTRING}\n\nLOCK = {text}\n", encoding="utf-8")
    temporary.replace(path)


def check_lock(lock: Any, where: str) -> dict[str, Any]:
    """The lock itself if all of it is right."""
    where = f"kernel lock {where}: "
    _keys(lock, ("format", "kernels"), f"{where}LOCK")
    _require(lock["format"] == FORMAT, f"{where}format", lock["format"], f"{FORMAT}")
    for name, kernel in _dict(lock["kernels"], f"{where}kernels").items():
        at = f"{where}kernels[{name!r}]"
        _match(NAME, name, f"{at}: the name", "such as 'fused-rnn'")
        _keys(kernel, ("repo", "version", "revision", "variants"), at)
        _match(REPO, kernel["repo"], f"{at}.repo", "'org/name'")
        version, revision = kernel["version"], kernel["revision"]
        _require(type(version) is int and version >= 0, f"{at}.version", version, "an int >= 0")
        if revision is not None:
            _match(REVISION, revision, f"{at}.revision", "a commit, 40 hex digits, or None")
        variants = _dict(kernel["variants"], f"{at}.variants")
        must = "empty while revision is None, and only then"
        _require(bool(variants) != (revision is None), f"{at}.variants", sorted(variants), must)
        for variant, entry in variants.items():
            _check_variant(variant, entry, f"{at}.variants[{variant!r}]")
    return lock


def differences(directory: Path, files: dict[str, str]) -> list[str]:
    """How the directory differs from the lock; __pycache__ may be there, as it is never read."""
    there = set()
    for folder, folders, names in os.walk(directory):
        at = Path(folder)
        folders[:] = [f for f in folders if f != "__pycache__" or (at / f).is_symlink()]
        links = [f for f in folders if (at / f).is_symlink()]  # not walked: Python would follow
        there |= {(at / name).relative_to(directory).as_posix() for name in names + links}
    wrong = [f"{file} is missing" for file in sorted(set(files) - there)]
    wrong += [f"{file} is not in the lock" for file in sorted(there - set(files))]
    for file in sorted(there & set(files)):
        found = hashlib.sha256((directory / file).read_bytes()).hexdigest()
        if found != files[file]:
            wrong.append(f"{file} has sha256 {found}, expected {files[file]}")
    return wrong


def _check_variant(variant: Any, entry: Any, at: str) -> None:
    _match(VARIANT, variant, f"{at}: the name", "a directory below build/")
    _keys(entry, ("id", "archs", "files"), at)
    _match(ID, entry["id"], f"{at}.id", "a Python name that starts with _")
    _require(isinstance(entry["archs"], list), f"{at}.archs", entry["archs"], "a list")
    for arch in entry["archs"]:
        _match(ARCH, arch, f"{at}.archs", "CUDA archs such as '9.0a' or '10.0+PTX'")
    files = _dict(entry["files"], f"{at}.files")
    for file, sha256 in files.items():
        _match(FILE, file, f"{at}.files: a name", "a relative path inside the variant")
        _match(SHA256, sha256, f"{at}.files[{file!r}]", "a sha256, 64 hex digits")
    absent = ", ".join(sorted(ALWAYS_THERE - set(files)))
    _require(not absent, f"{at}.files", f"without {absent}", "every file of the variant")


def _assigns_lock(statement: ast.Assign) -> bool:
    return any(isinstance(t, ast.Name) and t.id == "LOCK" for t in statement.targets)


def _dict(value: Any, at: str) -> dict[Any, Any]:
    _require(isinstance(value, dict), at, value, "a dict")
    return value


def _keys(value: Any, keys: tuple[str, ...], at: str) -> None:
    if set(_dict(value, at)) != set(keys):
        _require(False, at, f"a dict of {', '.join(map(str, value))}", f"of {', '.join(keys)}")


def _match(pattern: str, value: Any, at: str, must: str) -> None:
    _require(isinstance(value, str) and re.fullmatch(pattern, value) is not None, at, value, must)


def _require(ok: bool, at: str, was: Any, must: str) -> None:
    if not ok:
        raise LockError(f"{at} is {was if isinstance(was, str) else repr(was)}, but must be {must}")
