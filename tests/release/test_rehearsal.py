"""scripts/release: what it refuses, and a whole rehearsal that is killed in every step and resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from releasing import release
from releasing.progress import State, Stop, check
from releasing.steps import steps
from tooling.builder import HERE, MACHINES

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = ("tests",)  # this is one of them
NAMES = [step.name for step in steps(rehearsal=True) if step.name not in SKIPPED]


def git(folder: Path, *arguments: object) -> str:
    nobody = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    command = ["git", "-C", folder, *nobody, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A clean checkout of what this one holds, committed or not."""
    folder = tmp_path_factory.mktemp("checkout")
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "everything")
    return folder


class Command:
    """A running scripts/release of a checkout; its programs are known by a variable."""

    def __init__(self, checkout: Path, *arguments: object):
        self.mark = f"RELEASE_OF_A_TEST={checkout}"
        command = [sys.executable, "-u", checkout / "scripts/release", *arguments, "--here"]
        name, _, value = self.mark.partition("=")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHCELL_", "HF_"))}
        variables |= {name: value, "PYTHONPATH": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=variables, **pipes)
        self.said: list[str] = []

    def wait(self) -> tuple[int, str]:
        self.said += self.process.stdout
        return self.process.wait(), "".join(self.said)

    def wait_for(self, beginning: str) -> None:
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith(beginning):
                return
        pytest.fail(f"no line began with {beginning!r}:\n{''.join(self.said)}")

    def programs(self) -> list[int]:
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if self.mark.encode() in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
            except OSError:  # it has ended, or is somebody else's
                continue
        return found


def test_what_is_refused(checkout):
    status, said = Command(checkout, "--skip", "tests").wait()
    assert (status, "--skip is tests, but a release is whole: use --rehearse" in said) == (2, True)
    status, said = Command(checkout, "--rehearse", "--backend", "cuda").wait()
    assert (status, "--backend is cuda, but must have cpu" in said) == (2, True)
    status, said = Command(checkout, "--archs", "9.0a").wait()
    assert (status, "--archs is 9.0a, but a release is whole: use --rehearse" in said) == (2, True)
    status, said = Command(checkout, "--rehearse", "--backend", "cpu", "--archs", "9.0a").wait()
    assert (status, "--archs is '9.0a', but only the cuda backend" in said) == (2, True)
    (other,) = {*MACHINES} - {HERE}
    status, said = Command(checkout, "--rehearse", "--machine", other).wait()
    assert (status, f"--machine is {other}, but must have {HERE}" in said) == (2, True)
    status, said = Command(checkout, "--help").wait()
    assert (status, f"default: {' '.join(sorted(MACHINES))}" in said) == (0, True)
    status, said = Command(checkout, "--rehearse", "--skip", "wheels").wait()
    assert (status, "--skip is wheels, but index, install, notes need it" in said) == (1, True)
    (checkout / "new").touch()
    try:
        status, said = Command(checkout, "--rehearse").wait()
    finally:
        (checkout / "new").unlink()
    assert "1 uncommitted changes (?? new, ...), but a release is of a commit" in said
    assert (status, "Traceback" in said) == (1, False)
    assert not (checkout / ".flashcell/rehearsal").exists()


def test_the_lock_is_for_a_person_to_commit(checkout):
    lock = checkout / "modeling/hub/kernels_lock.py"
    before = lock.read_text()
    try:
        lock.write_text(before + "\n")
        status, said = Command(checkout).wait()
    finally:
        lock.write_text(before)
    assert (status, "kernels_lock.py is not committed: review it, and\n  git commit " in said) == (
        1,
        True,
    )


def test_a_release_stops_where_a_person_is_needed(checkout, monkeypatch):
    """As far as it comes without a network: unsigned variants, and a changelog without a date."""
    monkeypatch.setattr(release, "ROOT", checkout)
    home = checkout / ".flashcell"
    made = release.Release(
        "0.1.0", home, ["cpu", "cuda", "universal"], [*MACHINES], None, here=True
    )
    variant = checkout / "kernel_builds/tfla/build/torch-stable-abi210-cpu-x86_64-linux"
    variant.mkdir(parents=True)
    (variant / "metadata.json").touch()
    made.folder.mkdir(parents=True)
    state = State(made.folder / "state.json", made.what())
    try:
        for name in ("tests", "kernels", "reproduce"):
            state.record(
                next(s for s in steps(False) if s.name == name), made.sources, "done by hand"
            )
        status, said = Command(checkout).wait()
        assert (status, "1 of 1 variants are not signed" in said) == (1, True), said
        assert "not there yet: CHANGELOG.md says 'unreleased' beside 0.1.0" in said
        state.record(
            next(s for s in steps(False) if s.name == "sign"), made.sources, "done by hand"
        )
        status, said = Command(checkout).wait()
        assert (status, "error: CHANGELOG.md says 'unreleased' beside" in said) == (1, True), said
        made.lock.write_text("LOCK = {}\n")
        with pytest.raises(Stop, match="users run what it pins: review it, commit it"):
            made.commit_lock()
        assert git(checkout, "status", "--porcelain").split() == ["M", release.LOCK]
        git(checkout, "checkout", release.LOCK)
    finally:
        shutil.rmtree(made.folder)
        shutil.rmtree(variant.parent)


@pytest.mark.slow
@pytest.mark.hub
def test_killed_in_every_step_and_resumed(checkout, fused_rnn, diagonal_rnn, tfla):
    """Each run goes on at the step that was cut; the last finds nothing to do; no program is left."""
    for build in ROOT.glob("kernel_builds/*/build"):  # as if they had been built there
        shutil.copytree(build, checkout / build.relative_to(ROOT), dirs_exist_ok=True)
    options = ("--rehearse", "--backend", "cpu", "--machine", HERE, "--skip", *SKIPPED)
    check(steps(rehearsal=True), SKIPPED)
    state, drawn = checkout / ".flashcell/rehearsal/state.json", random.Random(0)
    done: list[str] = []
    for name in NAMES:
        command = Command(checkout, *options)
        if name not in done:  # else it was too quick to be killed the last time
            command.wait_for(f"== {name} (")
            time.sleep(drawn.uniform(0, 2))
        command.process.send_signal(signal.SIGKILL)
        command.wait()
        deadline = time.monotonic() + 30
        while left := command.programs():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        begun = [line.split()[1] for line in command.said if line.startswith("== ") and "(" in line]
        assert not set(begun) & set(done), "a step that was done was taken again"
        if state.exists():
            done = list(json.loads(state.read_text())["done"])
        assert done == NAMES[: len(done)]
        assert len(done) >= NAMES.index(name)
    command = Command(checkout, *options)
    status, said = command.wait()
    assert status == 0, said
    assert "left out: the step tests, because of --skip" in said
    assert "left out: kernels and packages for cuda, because of --backend" in said
    for kernel in ("fused-rnn", "diagonal-rnn", "tfla"):
        assert f"{kernel}: torch-stable-abi210-cpu-x86_64-linux from the wheel flashcell" in said
        assert f"{kernel}: torch-stable-abi210-cpu-x86_64-linux from flashcell/{kernel}@" in said
    assert said.count("flashcell/flash-rnn-python-5m writes: 'def read_") == 2
    tree = checkout / ".flashcell/rehearsal/tree"
    assert git(tree, "diff", "--name-only", "HEAD~").split() == ["modeling/hub/kernels_lock.py"]
    assert git(checkout, "status", "--porcelain") == ""
    command = Command(checkout, *options)
    status, said = command.wait()
    assert (status, "nothing to do, every step is done for this commit" in said) == (0, True)
    assert not any(line.startswith("== ") for line in said.splitlines())
    assert command.programs() == []
