"""The folder of a training run: what it began with, its checkpoints and its curve."""

import csv
import json
import logging
import os
import shutil
from pathlib import Path

COLUMNS = ["step", "tokens", "learning_rate", "train_loss", "gradient_norm"]
COLUMNS += ["held_out_loss", "held_out_bits_per_byte", "seconds"]


def open_run(folder: Path, identity: dict, resume: bool, restart: bool) -> Path:
    """A new run, or one that began with the same `identity`: with another it would be another run."""
    if restart or Checkpoints(folder / "checkpoints").latest() is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "identity.json").write_text(json.dumps(identity, indent=2))
        return folder
    if not resume:
        raise ValueError(f"{folder} exists: --resume goes on with it, --restart begins again")
    began = json.loads((folder / "identity.json").read_text())
    for name in sorted({*began, *identity}):
        if began.get(name) != identity.get(name):
            raise ValueError(
                f"{folder} began with {name} = {began.get(name)}, now it is {identity.get(name)}: "
                "resume it as it began, or begin again with --restart"
            )
    return folder


class Checkpoints:
    """Complete states of a run. One is there wholly or not at all: it is written beside its place
    and renamed into it, and the one before goes only then."""

    def __init__(self, folder: Path):
        self.folder = folder
        # a tied head is stored once and loads as it was: no reason to warn with every checkpoint
        logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

    def latest(self) -> Path | None:
        found = [path for path in self.folder.glob("step-*") if path.name[5:].isdigit()]
        return max(found, default=None)

    def save(self, accelerator, progress: dict) -> None:
        """Called by all processes: each adds what it alone knows."""
        import torch

        target = self.folder / f"step-{progress['step']:08d}"
        staging = self.folder / "unfinished"
        main = accelerator.is_main_process
        if main:
            shutil.rmtree(staging, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(staging))  # model (safetensors), optimizer, scheduler, RNG
        torch.save(progress, staging / f"progress-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if main and not target.exists():
            for path in staging.rglob("*"):  # a crash of the machine must not leave empty files
                if path.is_file():
                    with open(path, "rb+") as file:
                        os.fsync(file.fileno())
            os.rename(staging, target)
            for old in self.folder.iterdir():
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()

    def load(self, accelerator) -> dict:
        import torch

        latest = self.latest()
        accelerator.load_state(str(latest))
        # our own file: it holds the carried cache, which is an object
        own = latest / f"progress-{accelerator.process_index}.pt"
        return torch.load(own, weights_only=False)


class Log:
    """The curve as CSV. After a kill, rows beyond the checkpoint are taken back."""

    def __init__(self, path: Path, step: int, columns: list[str] = COLUMNS):
        self.path, self.columns = path, columns
        rows = [row for row in self.rows() if int(row["step"]) <= step]
        staging = path.with_suffix(".new")
        with open(staging, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(staging, path)

    def rows(self) -> list[dict]:
        if not self.path.exists():
            return []
        with open(self.path, newline="") as file:
            whole = [line for line in file if line.endswith("\n")]  # not one cut off by a kill
        return list(csv.DictReader(whole))

    def append(self, *rows: dict) -> None:
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
            writer.writerows(rows)
