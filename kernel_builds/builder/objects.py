"""Keeps the objects of a build for the next one, which then compiles only what has changed.

ninja compiles a source again if the file is newer than its object. That misses changed options and tools,
and a file that was put back with an old date. A record therefore says what the objects were made from, and
where ninja would miss a change, they are all removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from build_toml import BuildError

BUILDER = Path(__file__).resolve().parent
COMPILERS = ("CMAKE_CXX_COMPILER", "CMAKE_CUDA_COMPILER")


class Objects:
    """The objects below a folder `work`, made from the files `sources` with cmake's `options` and the
    headers of a version of torch."""

    def __init__(self, work: Path, sources: Iterable[Path], options: dict[str, Any], torch: str):
        self.record, self.sources = work / "objects.json", list(sources)
        compilers = [Path(options[name]) for name in COMPILERS if name in options]
        self.made_with = [str(work), str(options), torch, *_programs(compilers)]
        self.made_with += _digests(BUILDER.rglob("*.py")).values()
        self.made_with += _digests(BUILDER.rglob("CMakeLists.txt")).values()
        self.digests = _digests(self.sources)

    def arguments(self) -> list[str]:
        """Returns cmake's arguments: none if the objects can stay. The record is removed, so that they
        do not stay if this build ends before `kept`."""
        stays = self._can_stay()
        self.record.unlink(missing_ok=True)
        return [] if stays else ["--fresh"]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Lets the next build use the objects that are compiled in the block, also if it raises; but not
        if a source changes meanwhile, because nobody knows which content an object has then."""
        text = json.dumps({"made with": self.made_with, "digests": self.digests})
        try:
            self.record.write_text(text)
        except OSError as error:
            raise BuildError(f"{self.record} cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            if _digests(self.sources) != self.digests:
                self.record.unlink(missing_ok=True)

    def _can_stay(self) -> bool:
        try:
            known: dict[str, Any] = json.loads(self.record.read_text())
            written = self.record.stat().st_mtime_ns
            changed = [f for f, d in self.digests.items() if known["digests"].get(f) != d]
            is_newer = all(Path(file).stat().st_mtime_ns > written for file in changed)
            return known["made with"] == self.made_with and is_newer
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False


def _programs(paths: Iterable[Path]) -> list[str]:
    """Returns names, sizes and dates of the compilers' files, which change if another version takes their
    place. A compiler may be several programs in one folder."""
    found = []
    for path in paths:
        for file in sorted(path.resolve().parent.iterdir()):
            if file.name.startswith(_family(path)):
                status = file.stat()
                found.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    return found


def _family(path: Path) -> str:
    """Returns how the names of a program's files begin: nothing for nvcc, all of whose folder belongs to it;
    the own name for others, which may lie in /usr/bin."""
    return "" if path.name == "nvcc" else path.resolve().name


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {
        str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files) if f.is_file()
    }
