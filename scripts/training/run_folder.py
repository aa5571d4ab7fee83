"""The folder of a training run: its identity, its lock and its loss curve."""

import csv
import fcntl
import io
import json
import shutil
from pathlib import Path
from typing import IO

from flashcell.utils.whole_file import write_file
from training.checkpoint import checkpoints_in
from training.manifest import check_file

COLUMNS = ["step", "tokens", "learning_rate", "train_loss", "gradient_norm"]
COLUMNS += ["held_out_loss", "held_out_bits_per_byte", "seconds"]


def open_run(folder: Path, identity: dict, resume: bool, restart: bool) -> IO:
    """Creates the folder of a run, or resumes one that was started with the same `identity`.

    Returns the lock file, which excludes other commands until this process ends."""
    lock = lock_run(folder)
    if restart or not checkpoints_in(folder / "checkpoints"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_file(folder / "identity.json", json.dumps(identity, indent=2).encode())
        return lock
    if not resume:
        raise ValueError(f"{folder} exists: --resume goes on with it, --restart begins again")
    began = read_identity(folder / "identity.json")
    for name in sorted({*began, *identity}):
        if began.get(name) != identity.get(name):
            raise ValueError(
                f"{folder} began with {name} = {began.get(name)}, now it is {identity.get(name)}: "
                "resume it as it began, or begin again with --restart"
            )
    return lock


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
