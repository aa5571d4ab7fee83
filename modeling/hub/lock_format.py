"""Reads and checks the kernel lock, which pins the reviewed files: only these may be loaded.

A lock is a Python file with one dict literal, ``LOCK = {...}``, because exported model repositories
carry it and only their `.py` files are copied. It is read without being executed:

    format    1, the int
    kernels   name -> repo      "org/name" on the Hub
                      version   the branch v<version> it is published on
                      revision  commit of that branch, or None: not on the Hub
                      variants  directory below build/ -> id     Python module and op namespace
                                                          archs  CUDA archs, [] for the CPU
                                                          files  relative path -> sha256
"""

import ast
import errno
import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

FORMAT = 1
DOCSTRING = '"""The published kernels that flashcell runs. Written by scripts/publish_kernels."""'
INSTALLED = (
    '"""The kernels that wheels of this release bring. Written when flashcell\'s wheel is built."""'
)
NAME = r"[a-z][-a-z0-9]*[a-z0-9]"
REPO = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
REVISION = r"[0-9a-f]{40}"
VARIANT = r"[a-z0-9][A-Za-z0-9_-]*"
ID = r"_[A-Za-z0-9_]+"
ARCH = r"\d+\.\d[af]?(\+PTX)?"
# Relative; no part is empty, ".", ".." or Python's cache, whose bytecode no source answers for.
FILE = r"(?!.*(^|/)(\.{0,2}|__pycache__)(/|$))[A-Za-z0-9_./-]+"
SHA256 = r"[0-9a-f]{64}"
ALWAYS_THERE = {"__init__.py", "metadata.json"}
LARGEST_FILE = 2**30  # bytes


class LockError(ValueError):
    """The lock is invalid; the message names the field, what it is and what it must be."""


def read_lock(path: Path) -> dict[str, Any]:
    """Returns the checked lock from a file, which is parsed and never executed."""
    try:
        body = ast.parse(read_file(path)).body
        found = [s.value for s in body if isinstance(s, ast.Assign) and _assigns_lock(s)]
        lock = [ast.literal_eval(value) for value in found]
        twice = [key for value in found for key in _repeated_keys(value)]
    except OSError as error:
        raise LockError(f"kernel lock {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        why = str(error) or type(error).__name__  # a MemoryError has no text
        raise LockError(f"kernel lock {path} is not LOCK = {{a literal}}: {why}") from error
    if len(lock) != 1:
        raise LockError(f"kernel lock {path} assigns LOCK {len(lock)} times, but must do so once")
    if twice:
        raise LockError(f"kernel lock {path} has the key {twice[0]} twice, but must have it once")
    return check_lock(lock[0], str(path))


def lock_source(lock: dict[str, Any], where: str, docstring: str = DOCSTRING) -> bytes:
    """Returns the content of a lock file for `lock`, after checking it."""
    text = json.dumps(check_lock(lock, where), indent=4).replace(": null", ": None")
    text = re.sub(r'(["\]}e\d])\n', r"\1,\n", text)  # trailing commas, as the formatter wants them
    return f"{docstring}\n\nLOCK = {text}\n".encode()


def check_lock(lock: Any, where: str) -> dict[str, Any]:
    """Returns `lock` if every field is valid, else raises LockError."""
    where = f"kernel lock {where}: "
    _keys(lock, ("format", "kernels"), f"{where}LOCK")
    version = lock["format"]
    _require(type(version) is int and version == FORMAT, f"{where}format", version, f"{FORMAT}")
    for name, kernel in _dict(lock["kernels"], f"{where}kernels").items():
        at = f"{where}kernels[{name!r}]"
        _match(NAME, name, f"{at}: the name", "such as 'fused-rnn'")
        _keys(kernel, ("repo", "version", "revision", "variants"), at)
        _match(REPO, kernel["repo"], f"{at}.repo", "'org/name'")
        version, revision = kernel["version"], kernel["revision"]
        right = type(version) is int and 0 <= version < 2**31
        _require(right, f"{at}.version", version, "an int >= 0 of 31 bits")
        if revision is not None:
            _match(REVISION, revision, f"{at}.revision", "a commit, 40 hex digits, or None")
        variants = _dict(kernel["variants"], f"{at}.variants")
        must = "those of the revision, at least one"
        _require(bool(variants) or revision is None, f"{at}.variants", sorted(variants), must)
        for variant, entry in variants.items():
            _check_variant(variant, entry, f"{at}.variants[{variant!r}]")
    return lock


def read_file(path: Path) -> bytes:
    """Returns the bytes of a regular file; raises OSError for any other, as a FIFO would block."""
    opener = lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    with open(path, "rb", opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > LARGEST_FILE:
            raise OSError(errno.EFBIG, f"larger than {LARGEST_FILE} bytes", str(path))
        return file.read(LARGEST_FILE)


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


def _repeated_keys(literal: ast.expr) -> list[str]:
    """Returns the keys that occur twice in a dict of the literal; Python would take the last
    one."""
    dicts = [node for node in ast.walk(literal) if isinstance(node, ast.Dict)]
    counts = [Counter(ast.literal_eval(key) for key in node.keys if key) for node in dicts]
    return [repr(key) for count in counts for key, times in count.items() if times > 1]


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
        raise LockError(f"{at} is {_shown(was)}, but must be {must}")


def _shown(was: Any) -> str:
    """Returns a short repr of a value, for an error message."""
    try:
        text = was if isinstance(was, str) else repr(was)
    except ValueError:
        text = "an int of too many digits"
    return text if len(text) < 500 else f"{text[:500]}..."
