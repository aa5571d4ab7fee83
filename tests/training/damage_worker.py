"""Damages the files of a run of scripts/train: damage_worker.py FOLDER. What cannot be repaired is
named, and the resumed run has the whole run's curve and weights or does not continue."""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from forked_runs import finish, results, start, wait

from training.checkpoint import checkpoints_in, read_state, write_state
from training.manifest import describe, write_manifest


class Evil:
    """A pickle that tells if it was run."""

    def __reduce__(self):
        return print, ("the pickle was run",)


def flip(path: Path, part: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * part)] ^= 4
    path.write_bytes(content)


def truncate(path: Path, part: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def manifest(change):
    """Writes a manifest with wrong contents."""

    def damage(checkpoint: Path) -> None:
        files = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(json.dumps(change(files)))

    return damage


def state(change):
    """Writes another state, with a manifest that matches it."""

    def damage(checkpoint: Path) -> None:
        path = checkpoint / "process-0.pt"
        saved = change(read_state(path))
        path.unlink()
        write_state(path, saved)
        write_manifest(checkpoint, {path.name: describe(path)})

    return damage


def first_weight(saved: dict) -> str:
    return next(iter(saved["model"]))


def another_shape(saved: dict) -> dict:
    saved["model"][first_weight(saved)] = torch.zeros(3)
    return saved


def another_moment(saved: dict) -> dict:
    saved["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1)
    return saved


def replace_by_folder(checkpoint: Path) -> None:
    (checkpoint / "process-0.pt").unlink()
    (checkpoint / "process-0.pt").mkdir()


def replace_by_pipe(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")


FILE = "process-0.pt"
# damage to the newest checkpoint, and the message: the checkpoint before is used
DAMAGED = {
    "flipped": (lambda c: flip(c / FILE), "process-0.pt: sha256 is"),
    "flipped at the end": (lambda c: flip(c / FILE, 0.999), "process-0.pt: sha256 is"),
    "truncated": (lambda c: truncate(c / FILE), "process-0.pt: bytes is"),
    "empty": (lambda c: truncate(c / FILE, 0), "process-0.pt: bytes is 0"),
    "missing": (lambda c: (c / FILE).unlink(), "process-0.pt is not there"),
    "folder": (replace_by_folder, "process-0.pt is not there, or is no file"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json is not there"),
    "pipe": (replace_by_pipe, "manifest.json is not there, or is no file"),
    "half a manifest": (lambda c: truncate(c / "manifest.json"), "manifest.json is no manifest"),
    "deep": (lambda c: (c / "manifest.json").write_text("[" * 10**6), "is no manifest"),
    "empty manifest": (manifest(lambda files: {}), "manifest.json lists []"),
    "list": (manifest(lambda files: [1]), "manifest.json lists [1]"),
    "numbers": (manifest(lambda files: {FILE: 1}), "is no manifest"),
    "far away": (manifest(lambda files: {**files, "../../x": {}}), "but must list ['proc"),
    "huge": (manifest(lambda files: {FILE: {**files[FILE], "bytes": 2**60}}), "bytes is"),
}
# Damage to the newest checkpoint whose manifest still matches. It must be deliberate, so the run does
# not continue.
MADE = {
    "pickle": (state(lambda saved: Evil()), "process-0.pt is no checkpoint of this run"),
    "pickle inside": (state(lambda saved: {**saved, "progress": Evil()}), "is no checkpoint"),
    "no state": (state(lambda saved: [1, 2]), "is no checkpoint of this run"),
    "shape": (state(another_shape), "is [3] torch.float32, but must be"),
    "moment": (state(another_moment), "exp_avg is [1] torch.float32, but must be"),
    "sharded": (state(lambda saved: {**saved, "sharded": True}), "written with --strategy fsdp2"),
}
# damage to the run
RUN = {
    "identity": (lambda r: truncate(r / "identity.json"), "identity.json is damaged"),
    "identity list": (lambda r: (r / "identity.json").write_text("[]"), "is damaged: it is []"),
    "tokenizer": (lambda r: truncate(r / "tokenizer/tokenizer.json"), "tokenizer.json: bytes is"),
    "tokens": (lambda r: flip(r / "tokenizer/tokenizer.json"), "tokenizer.json: sha256 is"),
    "curve": (lambda r: flip(r / "training_log.csv", 0.01), "training_log.csv is damaged"),
    "curve of zeros": (
        lambda r: (r / "training_log.csv").write_bytes(b"\0" * 99 + b"\n"), "csv is damaged"
    ),
    "monitors": (lambda r: flip(r / "monitors.csv", 0), "monitors.csv is damaged"),
}  # fmt: skip


def prepare(folder: Path, home: str) -> Path:
    shutil.copytree(folder / "begun", folder / home)
    return folder / home / "runs/tiny"


def said(folder: Path, home: str) -> str:
    text = (folder / f"{home}.txt").read_text()
    assert "Traceback" not in text, text
    assert "the pickle was run" not in text
    return text


def refused(folder: Path, home: str, message: str, *options: str, **limits) -> None:
    assert wait(start(folder, home, *(options or ["--resume"]), **limits)) == 1, home
    assert message in said(folder, home), (home, said(folder, home))


def main() -> None:
    folder = Path(sys.argv[1])
    finish(folder, "whole")
    for _ in range(3):
        finish(folder, "begun", "--resume", "--max-minutes", "0.0001")
    for name, (damage, message) in DAMAGED.items():
        run = prepare(folder, name)
        newest, before = checkpoints_in(run / "checkpoints")
        damage(newest)
        finish(folder, name, "--resume")
        text = said(folder, name)
        assert f"{newest} is damaged: " in text, (name, text)
        assert message in text, (name, text)
        assert f"resumed at step {int(before.name[5:])} of" in text
        assert results(folder, "whole") == results(folder, name), name
        assert len(checkpoints_in(run / "checkpoints")) == 2
    for name, (damage, message) in (MADE | RUN).items():
        run = prepare(folder, name)
        damage(checkpoints_in(run / "checkpoints")[0] if name in MADE else run)
        refused(folder, name, message)

    run = prepare(folder, "both")
    for checkpoint in checkpoints_in(run / "checkpoints"):
        flip(checkpoint / FILE)
    refused(folder, "both", "no checkpoint is whole: --restart begins the run again")
    assert len(checkpoints_in(run / "checkpoints")) == 2
    finish(folder, "both", "--restart")
    assert results(folder, "whole") == results(folder, "both")

    run = prepare(folder, "full")
    size = (checkpoints_in(run / "checkpoints")[0] / FILE).stat().st_size
    refused(folder, "full", "File too large", largest_file=size // 2)
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        p.name for p in reversed(checkpoints_in(run / "checkpoints"))
    ]
    finish(folder, "full", "--resume")
    assert results(folder, "whole") == results(folder, "full")

    prepare(folder, "two")
    first = start(folder, "two", "--resume")
    log = folder / "two/runs/tiny/training_log.csv"
    rows = len(log.read_text().splitlines())
    while len(log.read_text().splitlines()) == rows:
        pass
    for options in (["--resume"], ["--restart"]):
        refused(folder, "two", "is in use: another command trains there", *options)
    assert wait(first) == 0
    assert results(folder, "whole") == results(folder, "two")
    print(f"{len(DAMAGED) + len(MADE) + len(RUN)} damaged runs")


if __name__ == "__main__":
    main()
