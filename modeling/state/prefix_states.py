"""States by the tokens that they have read: a prompt that begins like an earlier text goes on there.

A recurrent state is exact at any length and does not grow. It is kept in device memory while the
budget lasts, then in host memory, then, if there is a folder, on disk; the least recently used goes
first. A state is found by the SHA-256 of the model's identity and the tokens, and used only if the
tokens are equal too.

Which states are kept: those after a prompt, those at the end of a text, and those at a multiple of
BLOCK tokens up to which two prompts have been equal, such as the end of a common introduction.
"""

import hashlib
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .disk_states import StateFolder
from .rows import bytes_of, move_row

BLOCK = 64
LEAST = 16  # tokens; fewer are read as fast as their state is copied
SEEN = 2**16  # beginnings of prompts that are remembered, about 100 bytes each
OVERHEAD = 1024  # bytes that an entry takes besides its state and its tokens, about


@dataclass
class Entry:
    tokens: bytes
    state: Any
    size: int
    on_device: bool
    pinned: bool = False


class PrefixStates:
    """The states that all requests share. Any thread may call it."""

    def __init__(
        self, identity: bytes, config: Any, device: torch.device, device_bytes: int,
        host_bytes: int, folder: StateFolder | None = None,
    ):  # fmt: skip
        self.identity, self.config, self.device = identity, config, device
        self.budgets = {True: device_bytes if device.type != "cpu" else 0, False: host_bytes}
        self.used = {True: 0, False: 0}  # bytes on the device and in host memory
        self.folder = folder
        self.hits = self.misses = self.tokens_saved = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the newest last
        self._lengths: dict[bytes, Counter[int]] = {}  # by the digest of the whole blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            folder.listener = self._disk_changed
            for length, block, _ in folder.names():
                self._count(block, length, 1)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int]) -> Any | None:
        """Returns the state after most of the first tokens of a prompt, or None.

        At least one token is left to read: it gives the scores of the next."""
        tokens = as_bytes(ids)
        state = None
        for length, digest in self._candidates(tokens):
            state = self._get(digest, tokens[: 4 * length]) or self._load(digest, tokens, length)
            if state is not None:
                self.tokens_saved += length
                break
        self.hits, self.misses = self.hits + (state is not None), self.misses + (state is None)
        return state

    def cuts(self, ids: Sequence[int], begin: int) -> list[int]:
        """Returns after how many tokens of a prompt, read from `begin` on, to keep the state."""
        wanted = [len(ids)] if len(ids) >= LEAST else []
        common = 0
        with self._lock:
            for length, digest in self._blocks(as_bytes(ids), len(ids) - 1):
                if digest in self._seen:
                    common = length
                self._seen[digest] = None
                self._seen.move_to_end(digest)
            while len(self._seen) > SEEN:
                self._seen.popitem(last=False)
        return [*([common] if common > begin and common else []), *wanted]

    def keep(self, ids: torch.Tensor, state: Any, pinned: bool = False) -> None:
        """Keeps the state after `ids`; it is the callback `on_state` of a request."""
        tokens = as_bytes(ids.tolist())
        length = len(tokens) // 4
        if length < LEAST and not pinned:
            return
        *_, (_, block) = self._blocks(tokens, length)
        digest = self._digest(tokens)
        on_device = self.budgets[True] > 0
        entry = Entry(tokens, state, bytes_of(state) + len(tokens) + OVERHEAD, on_device, pinned)
        if entry.size > max(self.budgets.values()) and not pinned:
            return
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return
            self._insert(digest, block, entry)
        if self.folder is not None and not pinned:
            self.folder.put(length, block, digest, ids.tolist(), state)
        self._shrink()

    def _insert(self, digest: bytes, block: bytes, entry: Entry) -> None:
        self._entries[digest] = entry
        self.used[entry.on_device] += entry.size
        length = len(entry.tokens) // 4
        if self.folder is None or not self.folder.has(length, block, digest):
            self._count(block, length, 1)

    def _shrink(self) -> None:
        """Moves the oldest states to host memory, and drops the oldest of these."""
        while (old := self._over_budget(True)) is not None:
            digest, entry = old
            state = move_row(entry.state, "cpu", self.config)
            with self._lock:
                if self._entries.get(digest) is entry and entry.on_device:
                    entry.state, entry.on_device = state, False
                    self.used[True] -= entry.size
                    self.used[False] += entry.size
        while (old := self._over_budget(False)) is not None:
            with self._lock:
                if self._entries.pop(old[0], None) is not None:
                    self.used[False] -= old[1].size
                    length = len(old[1].tokens) // 4
                    *_, (_, block) = self._blocks(old[1].tokens, length)
                    if self.folder is None or not self.folder.has(length, block, old[0]):
                        self._count(block, length, -1)

    def _over_budget(self, on_device: bool) -> tuple[bytes, Entry] | None:
        with self._lock:
            if self.used[on_device] <= self.budgets[on_device]:
                return None
            return next(
                (
                    (digest, entry)
                    for digest, entry in self._entries.items()
                    if entry.on_device == on_device and not entry.pinned
                ),
                None,
            )

    def _count(self, block: bytes, length: int, change: int) -> None:
        """Counts the states of a length, in memory or on disk, that begin with the same blocks."""
        lengths = self._lengths.setdefault(block, Counter())
        lengths[length] += change
        if lengths[length] <= 0:
            del lengths[length]
        if not lengths:
            del self._lengths[block]

    def _disk_changed(self, length: int, block: bytes, digest: bytes, change: int) -> None:
        with self._lock:
            if digest not in self._entries:
                self._count(block, length, change)

    def _candidates(self, tokens: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields the lengths, from the longest on, and digests of beginnings that may be known."""
        most = len(tokens) // 4 - 1
        for whole, block in reversed(list(self._blocks(tokens, most))):
            with self._lock:
                lengths = sorted(self._lengths.get(block, ()), reverse=True)
            for length in lengths:
                if whole <= length <= most:
                    yield length, self._digest(tokens[: 4 * length])

    def _get(self, digest: bytes, tokens: bytes) -> Any | None:
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.tokens != tokens:
                return None
            self._entries.move_to_end(digest)
            return entry.state

    def _load(self, digest: bytes, tokens: bytes, length: int) -> Any | None:
        if self.folder is None:
            return None
        *_, (_, block) = self._blocks(tokens, length)
        state = self.folder.get(length, block, digest, tokens[: 4 * length])
        if state is not None:
            size = bytes_of(state) + 4 * length + OVERHEAD
            entry = Entry(tokens[: 4 * length], state, size, False)
            with self._lock:
                if digest not in self._entries and size <= self.budgets[False]:
                    self._entries[digest] = entry
                    self.used[False] += size
            self._shrink()
        return state

    def _digest(self, tokens: bytes) -> bytes:
        return hashlib.sha256(self.identity + tokens).digest()

    def _blocks(self, tokens: bytes, most: int) -> Iterator[tuple[int, bytes]]:
        """Yields every multiple of BLOCK up to `most` tokens, 0 included, with its digest."""
        hashed = hashlib.sha256(self.identity)
        yield 0, hashed.digest()
        for length in range(BLOCK, most + 1, BLOCK):
            hashed.update(tokens[4 * (length - BLOCK) : 4 * length])
            yield length, hashed.digest()


def as_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def model_identity(model: Any) -> bytes:
    """Returns a SHA-256 of a model's configuration and weights."""
    hashed = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.state_dict().items()):
        hashed.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        raw = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        hashed.update(raw.numpy().data)
    return hashed.digest()
