"""The folder of a training run: its identity, its lock and its loss curve."""

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flashcell.utils.whole_file import write_file
from training.checkpoint import checkpoints_in, remove
from training.manifest import check_file

COLUMNS = ["step", "tokens", "learning_rate", "train_loss", "gradient_norm"]
COLUMNS += ["held_out_loss", "held_out_bits_per_byte", "seconds"]
# What a run makes before its first checkpoint, and would make again.
BEGINNINGS = ["identity.json", "tokenizer", "training_log.csv", "monitors.csv", "tensorboard"]


def open_run(folder: Path, identity: dict, resume: bool, restart: bool) -> tuple[IO, bool]:
    """Locks the folder of a run, and checks that it may begin, or go on with the same `identity`.

    Returns the lock file, which excludes other commands until this process ends, and whether the
    run begins, by `new_run`."""
    lock = lock_run(folder)
    if restart:
        return lock, True
    if not checkpoints_in(folder / "checkpoints"):
        if valuable := worth_keeping(folder):
            raise ValueError(
                f"{folder} has no checkpoint, but {', '.join(valuable)}: --restart begins again, "
                "without them"
            )
        return lock, True
    if not resume:
        raise ValueError(f"{folder} exists: --resume goes on with it, --restart begins again")
    began = read_identity(folder / "identity.json")
    for name in sorted({*began, *identity}):
        if began.get(name) != identity.get(name):
            raise ValueError(
                f"{folder} began with {name} = {began.get(name)}, now it is {identity.get(name)}: "
                "resume it as it began, or begin again with --restart"
            )
    return lock, False


@contextmanager
def new_run(folder: Path, identity: dict) -> Iterator[Path]:
    """Yields a new folder, which takes the place of `folder` at the end of the block.

    If the block raises, what was in `folder` stays as it was."""
    new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    remove(new)  # a kill left it
    try:
        new.mkdir()
        write_file(new / "identity.json", json.dumps(identity, indent=2).encode())
        yield new
        remove(old)
        if os.path.lexists(folder):
            folder.rename(old)  # a kill while it is removed leaves no half of it in its place
        new.rename(folder)
    finally:
        remove(new)
    remove(old)


def worth_keeping(folder: Path) -> list[str]:
    """Returns what a folder without a checkpoint holds besides the beginnings of a first start."""
    if not os.path.lexists(folder):
        return []
    saved = folder / "checkpoints"
    found = [path for path in folder.iterdir() if path.name != saved.name]
    names = [path.name for path in found if not path.match(".*.unfinished-*")]
    valuable = {name for name in names if name not in BEGINNINGS}
    if os.path.lexists(saved) and any(path.name != "unfinished" for path in saved.iterdir()):
        valuable.add(saved.name)
    if "training_log.csv" in names and was_saved(folder):
        valuable.add("training_log.csv")
    return sorted(valuable)


def was_saved(folder: Path) -> bool:
    """Whether the loss curve goes on after a step at which a checkpoint was saved."""
    identity, log = folder / "identity.json", check_file(folder / "training_log.csv")
    began = read_identity(identity) if identity.exists() else {"recipe": {"checkpoint_every": 0}}
    try:
        with open(log, newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        return bool(steps) and max(steps) > began["recipe"]["checkpoint_every"]
    except (ValueError, KeyError, TypeError, csv.Error):  # damaged: nobody knows
        return True


def lock_run(folder: Path) -> IO:
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = check_file(folder.with_name(f".{folder.name}.lock"))
    file = open(path, "w")  # noqa: SIM115  held to the end
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is in use: another command trains there") from None
    return file


def read_identity(path: Path) -> dict:
    try:
        began = json.loads(check_file(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; --restart begins the run again") from None
    if not isinstance(began, dict):
        raise ValueError(f"{path} is damaged: it is {began!r:.40}; --restart begins the run again")
    return began


class Log:
    """Writes the loss curve as CSV; on resuming, removes the rows after the checkpoint."""

    def __init__(self, path: Path, step: int, columns: list[str] = COLUMNS):
        self.path, self.columns = path, columns
        try:
            rows = [row for row in self.rows() if int(row["step"]) <= step]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ValueError(
                f"{path} is damaged: {error!r}; delete it to go on without the rows so far"
            ) from None
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file(path, text.getvalue().encode())

    def rows(self) -> list[dict]:
        if not check_file(self.path).exists():
            return []
        with open(self.path, newline="") as file:
            whole = [
                line for line in file if line.endswith("\n")
            ]  # without a line that a kill cut off
        reader = csv.DictReader(whole)
        rows = list(reader)
        if whole and reader.fieldnames != self.columns:
            raise ValueError(f"it begins with {whole[0]!r:.60}")
        return rows

    def append(self, *rows: dict) -> None:
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
            writer.writerows(rows)
