"""Runs the programs of a build so that none outlives it, and locks the folder that they write to.

If the build is killed, ninja is told to end (PR_SET_PDEATHSIG), and ends its compilers. If ninja is
killed, its compilers become children of the build (PR_SET_CHILD_SUBREAPER), which ends them. If both
are killed at once, compilers go on; but every program of a build holds its lock, so that the next build
in that folder finds them, ends them, and begins when they are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BUILDER = "FLASHCELL_BUILDER"  # in the environment of a build's programs: the build's process
PAUSE = 0.05  # seconds


def run(
    command: list[str], environment: dict[str, str], lock: IO[str], quiet: bool = False
) -> tuple[int, str]:
    """Runs a program that holds `lock`, and returns its exit status and, if `quiet`, what it said."""
    builder = os.getpid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(
        command,
        env=environment | {BUILDER: f"{builder} {_started(builder)}"},
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        pass_fds=[lock.fileno()],
        preexec_fn=end_with(builder),
    )
    try:
        said, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        end_programs()
    return process.returncode, said or ""


def end_with(parent: int) -> Callable[[], None]:
    """Returns what a child of the process `parent` calls first, to be told to end when that ends."""
    libc = ctypes.CDLL(None)

    def follow() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(1)

    return follow


def end_programs() -> None:
    """Kills the programs of this build that are its children, and what they leave behind."""
    me = os.getpid()
    mine = lambda pid: _status(pid)[1:2] == [str(me)] and _builder(pid) == (me, _started(me))
    while children := [pid for pid in _processes() if mine(pid)]:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[IO[str]]:
    """Locks a file that no link may stand for, for one build at a time; yields it open."""
    with open(file, "w", opener=lambda *a: os.open(a[0], a[1] | os.O_NOFOLLOW)) as lock:
        said = False
        while not _try(lock):
            ended = end_orphans(lock)
            if not ended and not said:
                print(f"waiting for another build in {file.parent}", flush=True)
                said = True
            time.sleep(PAUSE)
        yield lock


def end_orphans(lock: IO[str]) -> int:
    """Kills the programs that hold `lock` for a build that has ended; returns how many there were."""
    wanted, ended = os.fstat(lock.fileno()), 0
    for pid in _processes():
        number, started = _builder(pid)
        if number and _started(number) != started and _has_open(pid, wanted):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                ended += 1
    return ended


def _builder(pid: int) -> tuple[int, str]:
    """Returns the process of the build that a program belongs to and when it started, or 0."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (found,) = (e for e in entries if e.startswith(BUILDER.encode() + b"="))
        number, started = found.decode().partition("=")[2].split(" ")
        return int(number), started
    except (OSError, ValueError):  # it is no build's, has ended, or is another user's
        return 0, ""


def _try(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended meanwhile
        return False
    for file in files:
        with contextlib.suppress(OSError):
            if os.path.samestat(file.stat(), wanted):
                return True
    return False


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _status(pid: int) -> list[str]:
    """Returns the fields of a process's stat after its name: state, parent, ...; [] if it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    """Returns when a process started, in the kernel's ticks, or "" if there is none."""
    status = _status(pid)
    return status[19] if status and status[0] != "Z" else ""
