"""A build that is killed leaves no compiler behind, and nothing that spoils the next build."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tooling import processes
from tooling.builder import variant

ROOT = Path(__file__).resolve().parents[2]
AXPY = Path(__file__).resolve().parent / "axpy"
CPU = "torch-stable-abi210-cpu-x86_64-linux"
# A compiler that takes a minute for the first source that it is given, once.
SLOW = """#!/bin/sh
case "$*" in *-o*cpu.cpp.o*) if mkdir {folder}/began 2>/dev/null; then sleep 60; fi ;; esac
exec g++ "$@"
"""


@pytest.fixture
def project(tmp_path):
    return Path(shutil.copytree(AXPY, tmp_path / "axpy"))


class Build:
    """A running build of `project`; its programs are known by a variable of their environment."""

    def __init__(self, project: Path, **variables: str):
        self.mark = f"{project}"
        command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project, "--here"]
        command += ["--backend", "cpu", "--home", project.parent / "home", "--jobs", "2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, **variables, "BUILD_OF_A_TEST": self.mark}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def programs(self) -> dict[int, str]:
        """Returns the processes of the build, and of earlier ones of the same project, by name."""
        wanted, found = f"BUILD_OF_A_TEST={self.mark}".encode(), {}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            folder = Path("/proc", pid)
            try:
                if wanted in (folder / "environ").read_bytes():
                    found[int(pid)] = (folder / "comm").read_text().strip()
            except OSError:  # it has ended, or is somebody else's
                continue
        return found

    def ninja(self) -> int:
        return next(pid for pid, name in self.programs().items() if name == "ninja")

    def wait_for_end_of_programs(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while self.programs():
            assert time.monotonic() < deadline, self.programs()
            time.sleep(0.05)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("build", marks=pytest.mark.slow),
        pytest.param("ninja", marks=pytest.mark.slow),
        "both",
    ],
)
def test_a_killed_build_leaves_no_compiler(project, tmp_path, killed):
    compiler = tmp_path / "g++"
    compiler.write_text(SLOW.format(folder=tmp_path))
    compiler.chmod(0o755)
    build = Build(project, CXX=str(compiler))
    deadline = time.monotonic() + 120
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        assert build.process.poll() is None, build.process.stdout.read()
        time.sleep(0.02)
    ninja = build.ninja()
    if killed == "both":  # nobody is left who could end the compiler
        os.kill(build.process.pid, signal.SIGSTOP)
        os.kill(ninja, signal.SIGKILL)
    if killed != "build":
        os.kill(ninja, signal.SIGKILL)
    if killed != "ninja":
        os.kill(build.process.pid, signal.SIGKILL)
    status = build.process.wait(30)
    assert status == (1 if killed == "ninja" else -signal.SIGKILL)
    if killed == "both":
        assert build.programs()
    else:
        build.wait_for_end_of_programs()
    started = time.monotonic()
    again = Build(project, CXX=str(compiler))
    said, _ = again.process.communicate(timeout=120)
    assert again.process.returncode == 0, said
    assert time.monotonic() - started < 50, "it has waited for the compiler of the killed build"
    again.wait_for_end_of_programs(1)
    assert [file.name for file in (project / "build").glob(".*")] == []


def test_a_lock_waits_for_a_build_that_lives(tmp_path, capfd):
    with processes.locked(tmp_path / "lock") as lock:
        code = "from tooling import processes; from pathlib import Path\n"
        code += f"with processes.locked(Path({str(tmp_path / 'lock')!r})): print('mine')"
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
        other = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == f"waiting for another build in {tmp_path}\n"
        # A program of this build, which lives, holds the lock too.
        status, said = processes.run(["sh", "-c", "sleep 0.3; echo done"], {}, lock, quiet=True)
        assert (status, said, other.poll()) == (0, "done\n", None)
    assert other.communicate(timeout=20)[0] == "mine\n"


def test_leftovers_of_killed_builds_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, f"{dead.pid}.old", os.getppid()):
        (tmp_path / f".{CPU}.{pid}/deep").mkdir(parents=True)
    variant._remove_leftovers(tmp_path, CPU)
    assert [file.name for file in tmp_path.iterdir()] == [f".{CPU}.{os.getppid()}"]


@pytest.mark.slow
def test_twenty_kills_and_twenty_good_builds(project):
    drawn, known = random.Random(0), {}
    for number in range(20):
        text = (AXPY / "csrc/axpy.h").read_text()
        (project / "csrc/axpy.h").write_text(f"{text}// {number % 2}\n")
        build = Build(project)
        time.sleep(drawn.uniform(0, 9))
        os.kill(build.process.pid, signal.SIGKILL)
        build.process.wait()
        build.wait_for_end_of_programs()
        again = Build(project)
        said, _ = again.process.communicate(timeout=300)
        assert again.process.returncode == 0, said
        digests = variant.digests(project / "build" / CPU)
        assert known.setdefault(number % 2, digests) == digests
        assert [file.name for file in (project / "build").glob(".*")] == []
