"""States in a folder on disk, which the next start of the server finds.

Each is a file of save_state's format, with its tokens, and is written whole or not at all. It is
written by a thread of its own, which skips states while too many wait. Names are
`<tokens>-<digest of the whole blocks>-<digest of the tokens>.safetensors`, in a folder for the
model.
"""

import contextlib
import logging
import os
import queue
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..utils.whole_file import write_file
from .rows import Shapes
from .serialization import read_state, state_bytes

logger = logging.getLogger(__name__)
WAITING = 64  # states that wait to be written, at most
Name = tuple[int, bytes, bytes]  # tokens, digest of the whole blocks, digest


class StateFolder:
    """The states on disk of one model, up to a number of bytes; the least recently used goes."""

    def __init__(self, place: Path, identity: bytes, config: Any, shapes: Shapes, budget: int):
        self.place = place / identity.hex()[:16]
        self.config, self.shapes, self.budget = config, shapes, budget
        self.written = self.skipped = self.damaged = self.used = 0
        self._sizes: OrderedDict[Name, int] = OrderedDict()  # the newest last
        # called with a name and 1 when a state is on disk, -1 when it is gone
        self.listener: Callable[[int, bytes, bytes, int], None] | None = None
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Name, list[int], Any] | None] = queue.Queue(WAITING)
        self.place.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._scan()
        self._thread = threading.Thread(target=self._write_all, name="states", daemon=True)
        self._thread.start()

    def names(self) -> list[Name]:
        return list(self._sizes)

    def has(self, *name: Any) -> bool:
        return name in self._sizes

    def put(self, length: int, block: bytes, digest: bytes, ids: list[int], state: Any) -> None:
        try:
            self._queue.put_nowait(((length, block, digest), ids, state))
        except queue.Full:
            self.skipped += 1

    def get(self, length: int, block: bytes, digest: bytes, tokens: bytes) -> Any | None:
        """Returns a state, if there is one of exactly these tokens; removes a damaged file."""
        name = length, block, digest
        if name not in self._sizes:
            return None
        path = self._path(name)
        try:
            state, ids = read_state(self.config, path, self.shapes)
            if ids is None or array("i", ids).tobytes() != tokens:
                raise ValueError(f"{path}: is the state after other tokens")
        except (OSError, ValueError) as error:
            logger.warning("a state on disk is not used: %s", error)
            self.damaged += 1
            self._remove(name)
            return None
        with self._lock, contextlib.suppress(KeyError, OSError):
            self._sizes.move_to_end(name)
            os.utime(path)
        return state

    def close(self) -> None:
        """Waits until what waits is written."""
        self._queue.put(None)
        self._thread.join()

    def _path(self, name: Name) -> Path:
        return self.place / f"{name[0]}-{name[1].hex()}-{name[2].hex()}.safetensors"

    def _scan(self) -> None:
        found = []
        for file in self.place.glob("*-*-*.safetensors"):
            with contextlib.suppress(ValueError, OSError):
                length, block, digest = file.stem.split("-")
                name = int(length), bytes.fromhex(block), bytes.fromhex(digest)
                about = file.stat()
                found.append((about.st_mtime_ns, name, about.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.used += size
        self._shrink()

    def _write_all(self) -> None:
        while (waiting := self._queue.get()) is not None:
            name, ids, state = waiting
            if name in self._sizes:
                continue
            try:
                content = state_bytes(self.config.model_type, state, ids)
                write_file(self._path(name), content, 0o600)
            except OSError as error:
                logger.warning("a state is not written to disk: %s", error)
                self.skipped += 1
                continue
            with self._lock:
                self._sizes[name] = len(content)
                self.used += len(content)
                self.written += 1
            self._tell(name, 1)
            self._shrink()

    def _shrink(self) -> None:
        while self.used > self.budget and self._sizes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, name: Name) -> None:
        with self._lock:
            self.used -= self._sizes.pop(name, 0)
        self._tell(name, -1)
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _tell(self, name: Name, change: int) -> None:
        if self.listener is not None:
            self.listener(*name, change)
