"""Loads text with `datasets` and packs its documents end to end into rows of tokens, isolated.

A recipe's `data` is what `datasets.load_dataset` takes (path, name, data_files, split, streaming,
...) and besides

    column               of the text; default "text"
    held_out_split       another split for the held-out text; without it one document in
                         `held_out_in` (of the recipe) is held out, whose own hash says so
    held_out_documents   so many of them are read; default 256

Each process reads documents of its own. A dataset on disk is shuffled anew in every epoch; a stream
comes in its own order, which is what can be resumed exactly: published corpora are shuffled already.
"""

import glob
import hashlib
import math
import queue
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from training.corpus import SPECIAL, held_out_lanes, kept_tokenizer, train_tokenizer
from training.corpus import _positions as positions_since
from training.manifest import describe

OURS = ("column", "held_out_split", "held_out_documents")
AT_A_TIME = 64  # documents the tokenizer is given together: it spreads them over the cores
AHEAD = 4  # chunks that are made in advance
FOR_TOKENIZER = 20_000  # documents that a tokenizer is trained on


def local_text(path: Path) -> dict:
    """Returns a recipe's `data` for local text: a folder of files, or one file's paragraphs."""
    path = path.resolve()  # `datasets` takes names for patterns of glob, and a::b for a in b
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ValueError(f"--text is {path}, but must be a file or a folder with files")
    if unclear := [file for file in files if "::" in str(file)]:
        raise ValueError(f"--text holds {unclear[0]}, but no name may have ::")
    by = "document" if path.is_dir() else "paragraph"
    return {"path": "text", "data_files": [glob.escape(str(f)) for f in files], "sample_by": by}


def local_files(data: dict) -> list[Path]:
    """Returns the files of what local_text returned."""
    return [Path(re.sub(r"\[([*?[])\]", r"\1", name)) for name in data["data_files"]]


def digest_of(files: list[Path]) -> str:
    """Returns a SHA-256 of the files' contents, in hexadecimal digits."""
    return hashlib.sha256("".join(describe(file)["sha256"] for file in files).encode()).hexdigest()


def read_text(path: Path) -> str:
    """Returns a file's text; the error of one that has none names it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ValueError(f"{path} is not text in UTF-8: {error.reason}, {where}") from None


class NotLoaded(ValueError):
    """Why `datasets` has not loaded a recipe's `data`."""


def why_not_loaded(data: dict, error: Exception) -> str:
    """Returns the cause of an error of `datasets`, which names no file: for files of text the first
    that is none."""
    named = data.get("data_files")
    if data.get("path") == "text" and isinstance(named, list):
        files = [path for path in local_files(data) if path.is_file()]
        for path in files:
            try:
                read_text(path)
            except (OSError, ValueError) as problem:
                return str(problem)
        if files and not any(path.stat().st_size for path in files):
            return f"must hold text: {files[0]} is empty"
    return f"cannot be loaded: {error.__cause__ or error}".partition("\n")[0]


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a document is held out, decided by its hash, so that copies agree."""
    return bool(one_in) and int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % one_in == 0


class Documents:
    """An endless iterator over the training documents of one process; `state` is its position."""

    def __init__(self, recipe, rank: int = 0, world: int = 1):
        import datasets
        from datasets.exceptions import DatasetGenerationError

        self.recipe, self.rank, self.world = recipe, rank, world
        self.column = recipe.data.get("column", "text")
        options = {"split": "train"} | {k: v for k, v in recipe.data.items() if k not in OURS}
        self.held_out_split = recipe.data.get("held_out_split")
        if not self.held_out_split and not recipe.held_out_in:
            raise ValueError("data.held_out_split or held_out_in must be given: one of them")
        self._load = lambda **changes: datasets.load_dataset(**{**options, **changes})
        try:
            self.table: Any = self._load()
        except DatasetGenerationError as error:
            raise NotLoaded(why_not_loaded(recipe.data, error)) from error
        self.streams = isinstance(self.table, datasets.IterableDataset)
        self.state = {"epoch": 0, "at": 0, "stream": None}

    def held_out(self) -> list[str]:
        """Returns the held-out texts, the same in every process."""
        table = self._load(split=self.held_out_split) if self.held_out_split else self.table
        one_in = 1 if self.held_out_split else self.recipe.held_out_in
        found: list[str] = []
        for row in table:
            if len(found) >= self.recipe.data.get("held_out_documents", 256):
                break
            if row[self.column].strip() and is_held_out(row[self.column], one_in):
                found.append(row[self.column])
        return found

    def why_none_is_held_out(self) -> str:
        if self.held_out_split:
            return f"data.held_out_split is {self.held_out_split!r}, but that split has no text"
        one_in = self.recipe.held_out_in
        count = "" if self.streams else f" of {len(self.table)}"
        return (
            f"no document{count} is held out, but one must be, to measure the model on. held_out_in "
            f"is {one_in}: about one document in {one_in} is held out, by its hash. Give more "
            "documents (of a single file each paragraph is one), or --set held_out_in=2"
        )

    def __iter__(self):
        one_in = 0 if self.held_out_split else self.recipe.held_out_in
        while True:
            empty = not self.state["at"]  # otherwise it was resumed, maybe at the end
            for text in self._stream() if self.streams else self._table():
                if text.strip() and not is_held_out(text, one_in):
                    empty = False
                    yield text
            if empty and not self._has_any(one_in):
                raise ValueError(f"data has no training document for process {self.rank}")
            self.state = {"epoch": self.state["epoch"] + 1, "at": 0, "stream": None}

    def _has_any(self, one_in: int) -> bool:
        """Whether a later epoch may bring this process a document: a table is dealt out anew."""
        texts = self.table[self.column] if not self.streams and self.rank < len(self.table) else ()
        return any(text.strip() and not is_held_out(text, one_in) for text in texts)

    def _stream(self):
        from datasets.distributed import split_dataset_by_node

        mine = split_dataset_by_node(self.table, rank=self.rank, world_size=self.world)
        if self.state["stream"] is not None:
            mine.load_state_dict(self.state["stream"])
        for row in mine:
            # state_dict() is a new object each time, so earlier states stay as they were
            self.state = {**self.state, "at": 1, "stream": mine.state_dict()}
            yield row[self.column]

    def _table(self):
        seed = [self.recipe.seed, self.state["epoch"]]
        mine = np.random.default_rng(seed).permutation(len(self.table))[self.rank :: self.world]
        for index in mine[self.state["at"] :]:
            self.state = {**self.state, "at": self.state["at"] + 1}
            yield self.table[int(index)][self.column]


class Rows:
    """Packs documents end to end into `count` rows that continue from chunk to chunk."""

    def __init__(self, documents: Documents, tokenizer, count: int, length: int, carry: bool):
        self.documents, self.tokenizer, self.count = documents, tokenizer, count
        self.length, self.carry = length, carry
        self.pending: list[np.ndarray] = []  # tokens of documents not yet in a row
        empty = np.empty(0, np.int64)
        self.rows = [(empty, empty)] * count  # tokens and positions that are left

    def state(self) -> dict:
        """Returns what a resumed run needs; its values are replaced later, never modified."""
        return {"documents": self.documents.state, "pending": self.pending, "rows": self.rows}

    def load(self, state: dict) -> None:
        self.documents.state = state["documents"]
        self.pending, self.rows = state["pending"], state["rows"]

    def chunks(self):
        """Yields (tokens, positions, targets), each [count, length], and the state after them."""
        source = iter(self.documents)
        while True:
            self.rows = [self._filled(row, source) for row in self.rows]
            tokens = np.stack([tokens[: self.length] for tokens, _ in self.rows])
            targets = np.stack([tokens[1 : self.length + 1] for tokens, _ in self.rows])
            positions = np.stack([positions[: self.length] for _, positions in self.rows])
            if not self.carry:  # a row begins with an empty state, wherever its document stands
                starts = positions == 0
                starts[:, 0] = True
                positions = positions_since(starts)
            self.rows = [(t[self.length :], p[self.length :]) for t, p in self.rows]
            yield (tokens, positions, targets), self.state()

    def _filled(self, row, source):
        tokens, positions = [row[0]], [row[1]]
        while sum(map(len, tokens)) <= self.length:  # one token more, for the last target
            if not self.pending:
                texts = [next(source) for _ in range(AT_A_TIME)]
                self.pending = encode_documents(self.tokenizer, texts)
            document, *self.pending = self.pending
            tokens.append(document)
            positions.append(np.arange(len(document)))
        return np.concatenate(tokens), np.concatenate(positions)


def encode_documents(tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encodes documents, each with one special token first, whatever the tokenizer adds itself."""
    first = tokenizer.bos_token_id
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.asarray([first, *ids], dtype=np.int64) for ids in found]


class DatasetTexts:
    """The data of a run from a recipe's `data`: tokenizer, training chunks, held-out rows.

    It has the interface of corpus.Texts, which serves the standard library."""

    def __init__(self, recipe, folder: Path, rank: int = 0, world: int = 1):
        self.recipe = recipe
        self.documents = Documents(recipe, rank, world)
        self.held_out_texts = self.documents.held_out()
        if not self.held_out_texts:
            raise ValueError(self.documents.why_none_is_held_out())
        self.tokenizer = self._tokenizer(folder)
        encoded = encode_documents(self.tokenizer, self.held_out_texts)
        self.held_out_lanes = held_out_lanes(encoded, self.tokenizer.bos_token_id)
        self.held_out_bytes = sum(len(text.encode()) for text in self.held_out_texts)
        rows = recipe.batch // world
        self.rows = Rows(self.documents, self.tokenizer, rows, recipe.length, recipe.carry)
        self.last = self.rows.state()
        self.ready: queue.Queue | None = None

    def _tokenizer(self, folder: Path):
        if self.recipe.tokenizer:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.recipe.tokenizer)
            if tokenizer.bos_token_id is None:
                tokenizer.bos_token = tokenizer.eos_token or SPECIAL
            return tokenizer
        return kept_tokenizer(folder, self._train_tokenizer)

    def _train_tokenizer(self):
        source = Documents(self.recipe)  # the documents of all processes
        texts = source._stream() if source.streams else source._table()
        held_out = set(self.held_out_texts)
        some = [t for t, _ in zip(texts, range(FOR_TOKENIZER), strict=False) if t.strip()]
        return train_tokenizer([t for t in some if t not in held_out], self.recipe.vocab_size)

    def check(self) -> None:
        """Raises unless there is a training document."""
        before = self.documents.state
        next(iter(self.documents))
        self.documents.state = before

    def describe(self) -> str:
        source = self.recipe.data.get("path"), self.recipe.data.get("name") or ""
        return f"{' '.join(source).strip()}, {len(self.held_out_texts)} documents held out"

    def bits_per_byte(self, nats_per_token: float) -> float:
        predictions = int((self.held_out_lanes.targets != -100).sum())
        return nats_per_token / math.log(2) * predictions / self.held_out_bytes

    def training_chunk(self, step: int) -> tuple[tuple[np.ndarray, ...], bool]:
        """Returns the next chunk, prepared in a thread, and whether the rows restart with empty
        states."""
        if self.ready is None:
            self.ready = queue.Queue(AHEAD)
            threading.Thread(target=self._make, daemon=True).start()
        made = self.ready.get()
        if isinstance(made, BaseException):
            raise made
        chunk, self.last = made
        return chunk, step == 0

    def _make(self) -> None:
        try:
            for made in self.rows.chunks():
                self.ready.put(made)
        except BaseException as error:  # raised where the chunk is asked for
            self.ready.put(error)

    def state(self) -> dict:
        """Returns the state after the last chunk taken, however many are prepared."""
        return self.last

    def load(self, state: dict) -> None:
        self.rows.load(state)
        self.last = state
