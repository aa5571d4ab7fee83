"""Tests that a file is either old or new if its writer is killed, and that nothing else stays
beside it."""

import fcntl
import os
import random
import signal
import stat
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from flashcell.utils import whole_file
from flashcell.utils.whole_file import SLOTS, write_file

CALLS = ("open", "link", "fsync", "replace")  # the functions of os at which a kill matters
OLD, NEW = b"old" * 1000, b"newer" * 1000


@pytest.fixture(params=["nameless", "named"])
def how(request, monkeypatch):
    """With files that have no name while they are written, and on a system without such files."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")
    return request.param


def fork(work) -> int:
    """Runs `work` in a process; its exit status is 0 if that returned."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return process


def killed_at(point: int, monkeypatch, path: Path) -> str | None:
    """Writes NEW in a process that kills itself before its call with that number; returns the
    call's name, or None if there is no such call."""
    left = count()
    read, write = os.pipe()

    def deadly(name: str):
        call = getattr(os, name)

        def counted(*args, **kwargs):
            if next(left) == point:
                os.write(write, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    def work():
        for name in CALLS:
            monkeypatch.setattr(os, name, deadly(name))
        write_file(path, NEW)

    _, status = os.waitpid(fork(work), 0)
    os.close(write)
    name = os.read(read, 99).decode()
    os.close(read)
    assert status == (signal.SIGKILL if name else 0)
    return name or None


def test_a_kill_at_any_moment(how, monkeypatch, tmp_path):
    monkeypatch.setattr(whole_file, "SLOTS", 3)
    path, seen = tmp_path / "file", []
    for existed in (True, False):
        for point in count():
            if existed:
                write_file(path, OLD)
            else:
                path.unlink(missing_ok=True)
            name = killed_at(point, monkeypatch, path)
            if name is None:
                break
            seen.append(name)
            content = path.read_bytes() if path.exists() else None
            assert content in (OLD if existed else None, NEW)
            left = [p.name for p in tmp_path.iterdir() if p != path]
            assert left in ([], [".file.unfinished-0"])
            if how == "nameless" and name != "replace":
                assert left == []
            write_file(path, OLD)
            assert os.listdir(tmp_path) == ["file"]
    assert {"open", "fsync", "replace"} < set(seen) if how == "nameless" else {"fsync"} < set(seen)


def test_a_writer_that_lives_is_left_alone(how, monkeypatch, tmp_path):
    path = tmp_path / "file"
    write_file(path, OLD)
    ready, go = os.pipe(), os.pipe()
    replace = os.replace

    def slow(*args, **kwargs):
        os.write(ready[1], b".")
        os.read(go[0], 1)
        replace(*args, **kwargs)

    def work():
        monkeypatch.setattr(os, "replace", slow)
        write_file(path, NEW)

    process = fork(work)
    os.read(ready[0], 1)
    for content in (b"first", b"second"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == [".file.unfinished-0", "file"]
    os.write(go[1], b".")
    assert os.waitpid(process, 0)[1] == 0
    assert path.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]


def test_one_that_was_removed_before_it_was_locked(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "O_TMPFILE")
    path, lock = tmp_path / "file", whole_file._lock

    def late(handle):
        monkeypatch.setattr(whole_file, "_lock", lock)
        write_file(path, OLD)  # takes the new file for abandoned
        lock(handle)

    monkeypatch.setattr(whole_file, "_lock", late)
    write_file(path, NEW)
    assert path.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]


def test_many_at_once_and_some_are_killed(how, tmp_path):
    path, contents = tmp_path / "file", [bytes([i]) * 50_000 for i in range(16)]
    write_file(path, contents[0])

    def work():
        def some(seed: int):
            draw = random.Random(seed)
            for _ in range(60):
                write_file(path, draw.choice(contents))

        threads = [threading.Thread(target=some, args=(os.getpid() + i,)) for i in range(3)]
        [t.start() for t in threads]
        [t.join() for t in threads]

    processes, draw = [fork(work) for _ in range(4)], random.Random(1)
    for process in processes[:2]:
        for _ in range(20):
            assert path.read_bytes() in contents
        time.sleep(draw.uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
    status = [os.waitpid(process, 0)[1] for process in processes]
    assert status[2:] == [0, 0]
    assert path.read_bytes() in contents
    write_file(path, NEW)
    assert os.listdir(tmp_path) == ["file"]


def test_too_many_at_once(tmp_path):
    path, held = tmp_path / "file", []
    write_file(path, OLD)
    for k in range(SLOTS):
        held.append(open(tmp_path / f".file.unfinished-{k}", "wb"))  # noqa: SIM115
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    with pytest.raises(OSError, match=f"{SLOTS} others are writing this file: '{path}'"):
        write_file(path, NEW)
    assert path.read_bytes() == OLD
    held[7].close()
    write_file(path, NEW)
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["file", *(f".file.unfinished-{k}" for k in range(SLOTS) if k != 7)]
    )


def test_where_there_are_no_locks(how, monkeypatch, tmp_path):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    path, other = tmp_path / "file", tmp_path / ".file.unfinished-0"
    other.write_bytes(b"of a writer of whom nobody knows")
    for content in (OLD, NEW):
        write_file(path, content)
        assert path.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == [other.name, "file"]


def test_only_files_are_taken_for_unfinished_ones(how, tmp_path):
    (tmp_path / "kept").write_bytes(OLD)
    (tmp_path / ".file.unfinished-0").symlink_to("kept")
    (tmp_path / ".file.unfinished-1").mkdir()
    os.mkfifo(tmp_path / ".file.unfinished-2")
    write_file(tmp_path / "file", OLD)
    write_file(tmp_path / "file", NEW)
    assert (tmp_path / "kept").read_bytes() == OLD
    assert (tmp_path / ".file.unfinished-0").is_symlink()
    assert (tmp_path / ".file.unfinished-1").is_dir()
    assert (tmp_path / ".file.unfinished-2").is_fifo()


def test_a_link_is_replaced_and_a_mode_is_kept_to(how, tmp_path):
    (tmp_path / "target").write_bytes(OLD)
    for target in ("target", "nowhere"):
        path = tmp_path / "link"
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        before = os.umask(0o027)
        try:
            write_file(path, NEW)
        finally:
            os.umask(before)
        assert not path.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert path.read_bytes() == NEW
    assert (tmp_path / "target").read_bytes() == OLD
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]
    write_file(tmp_path / "program", b"", 0o600)
    assert stat.S_IMODE((tmp_path / "program").stat().st_mode) == 0o600


def test_what_is_no_file_stays(how, tmp_path):
    """A device such as /dev/null is not replaced, nor is a pipe, though root could do it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match=f"no regular file.*'{path}'"):
        write_file(path, NEW)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_errors_name_the_path(how, monkeypatch, tmp_path):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    wrong = {
        "nowhere/file": FileNotFoundError,
        "folder": IsADirectoryError,
        "": OSError,
        "..": OSError,
        "folder/": OSError,
        "x" * 256: OSError,
    }
    for path, error in wrong.items():
        with pytest.raises(error, match=f"'{path}'"):
            write_file(path, NEW)
        assert os.listdir(tmp_path) == ["folder"], path
        assert os.listdir("folder") == [], path
    write_file("file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW
