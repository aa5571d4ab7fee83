"""Tests that a run's folder is replaced when a new run can begin, and never what is worth keeping."""

import csv
import io
import json
from pathlib import Path

import pytest

from training.run_folder import COLUMNS, new_run, open_run

IDENTITY = {"recipe": {"checkpoint_every": 5}}


def curve(last: int) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    writer.writerows({"step": step} for step in range(1, last + 1))
    return text.getvalue()


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def begin(folder: Path, resume: bool = False, restart: bool = False) -> bool:
    lock, begins = open_run(folder, IDENTITY, resume, restart)
    lock.close()
    return begins


BEGUN = {"identity.json": json.dumps(IDENTITY)}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"model/model.safetensors": "weights"}, "model"),
        ({"cards/README.md": "", "notes.txt": "mine"}, "cards, notes.txt"),
        ({"checkpoints/kept-00000040/process-0.pt": ""}, "checkpoints"),
        ({"training_log.csv": curve(6)}, "training_log.csv"),
        ({"training_log.csv": "damaged\n1\n"}, "training_log.csv"),
    ],
    ids=["model", "others", "checkpoint", "curve", "damaged curve"],
)
def test_what_is_worth_keeping_is_refused(tmp_path, files, named, resume):
    folder = write(tmp_path / "run", BEGUN | files)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=f"run has no checkpoint, but {named}: --restart begins"):
        begin(folder, resume=resume)
    assert content(folder) == {k.removeprefix("run/"): v for k, v in before.items()}
    assert begin(folder, restart=True)
    assert content(folder) == {k.removeprefix("run/"): v for k, v in before.items()}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        BEGUN,
        {".identity.json.unfinished-0": "{"},
        BEGUN | {"tokenizer/tokenizer.json": "{", "tensorboard/events": ""},
        BEGUN | {"training_log.csv": curve(5), "monitors.csv": "", "checkpoints/unfinished/a": ""},
    ],
    ids=["nothing", "empty", "identity", "half a file", "tokenizer", "before a checkpoint"],
)
def test_a_first_start_that_was_stopped_begins_again(tmp_path, files, resume):
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        write(folder, files)
    assert begin(folder, resume=resume)
    with new_run(folder, IDENTITY) as new:
        write(new, {"tokenizer/new": ""})
    assert sorted(content(folder)) == ["identity.json", "tokenizer/new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.lock", "run"]


def test_a_run_stays_until_the_new_one_can_begin(tmp_path):
    folder = write(tmp_path / "run", BEGUN | {"model/model.safetensors": "weights"})
    write(tmp_path / ".run.new", {"left": "by a kill"})
    write(tmp_path / ".run.old", {"left": "by a kill"})
    before = content(folder)

    def fail() -> None:
        assert content(folder) == before
        raise ValueError("the text is damaged")

    with pytest.raises(ValueError, match="the text is damaged"), new_run(folder, IDENTITY):
        fail()
    assert content(folder) == before
    assert not (tmp_path / ".run.new").exists()
    with new_run(folder, IDENTITY) as new:
        assert content(folder) == before
        assert list(content(new)) == ["identity.json"]
    assert list(content(folder)) == ["identity.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
