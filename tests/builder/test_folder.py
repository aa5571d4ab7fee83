"""Tests what scripts/build_kernels does in its state folder, and that it writes there only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tooling.builder import variant

ROOT = Path(__file__).resolve().parents[2]
NVCC = """#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.0" ;;
    --list-gpu-code) echo sm_90 ;;
    *) echo no >&2; exit 1 ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    return Path(shutil.copytree(Path(__file__).with_name("axpy"), tmp_path / "axpy"))


def build(project, *arguments):
    command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project, "--here"]
    command += ["--home", project.parent / "home", "--jobs", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("check", [(), ("--check",)], ids=["build", "check"])
def test_cuda_is_compiled_below_the_state_folder(project, tmp_path, check):
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    cuda = ("--backend", "cuda", "--archs", "9.0", "--nvcc", tmp_path / "nvcc", *check)
    done = build(project, *cuda)
    assert "cmake could not configure the build" in done.stderr  # it gets no further without nvcc
    (work,) = (tmp_path / "home/build").iterdir()
    assert (work / "objects/CMakeCache.txt").is_file()
    assert f"KERNEL_DIR:PATH={project}" in (work / "objects/CMakeCache.txt").read_text()


def in_place_of(project, tmp_path, at: str) -> Path:
    """Replaces a folder that a build would write to by a link to somebody's folder."""
    victim, place = tmp_path / "victim", tmp_path / "home/build"
    (victim / "objects").mkdir(parents=True)
    (victim / "objects/CMakeCache.txt").write_text("mine")
    if at == "work":
        assert build(project, "--backend", "universal").returncode == 0
        (place,) = place.iterdir()
        shutil.rmtree(project / "build")
        shutil.rmtree(place)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(victim)
    return victim


@pytest.mark.parametrize("at", ["build", "work"])
def test_a_link_is_refused(project, tmp_path, at):
    victim = in_place_of(project, tmp_path, at)
    before = sorted(victim.rglob("*"))
    done = build(project, "--backend", "universal")
    assert done.returncode == 1
    assert "is not a folder of this user's own" in done.stderr
    assert sorted(victim.rglob("*")) == before


def test_a_link_in_place_of_the_lock_is_refused(project, tmp_path):
    assert build(project, "--backend", "universal").returncode == 0
    (work,) = (tmp_path / "home/build").iterdir()
    (tmp_path / "mine").write_text("mine")
    (work / "lock").unlink()
    (work / "lock").symlink_to(tmp_path / "mine")
    shutil.rmtree(project / "build")
    assert build(project, "--backend", "universal").returncode == 1
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_another_user_s_folder_is_refused(project, tmp_path):
    (tmp_path / "home/build").mkdir(parents=True)
    os.chown(tmp_path / "home/build", 65534, 65534)
    done = build(project, "--backend", "universal")
    assert "is not a folder of this user's own" in done.stderr


@pytest.mark.slow
def test_two_checkouts_build_at_once_and_one_twice(project, tmp_path):
    """They share a state folder; the second build of one project finds what the first has built."""
    other = Path(shutil.copytree(project, tmp_path / "deeper" / "axpy"))
    command = [sys.executable, ROOT / "scripts/build_kernels", "--backend", "cpu", "--here"]
    command += ["--home", tmp_path / "home", "--jobs", "2", "--kernel"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    builds = [subprocess.Popen([*command, at], **pipes) for at in (project, other, project)]
    said = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0, 0], said
    assert len(list((tmp_path / "home/build").iterdir())) == 2
    assert sorted("up to date" in text for text in said) == [False, False, True]
    made = [next((at / "build").glob("torch-stable*")) for at in (project, other)]
    assert variant.digests(made[0]) == variant.digests(made[1])


@pytest.mark.slow
def test_only_what_has_changed_is_compiled_again(project):
    first = build(project, "--backend", "cpu")
    assert first.returncode == 0, first.stdout + first.stderr
    objects = {file.name: file for file in project.parent.glob("home/build/*/objects/**/*.o")}
    assert {"ops.cpp.o", "cpu.cpp.o"} < set(objects)

    def compiled(status=0):
        before = {name: file.stat().st_mtime_ns for name, file in objects.items()}
        done = build(project, "--backend", "cpu")
        assert done.returncode == status, done.stdout + done.stderr
        return {n for n, f in objects.items() if not f.exists() or f.stat().st_mtime_ns > before[n]}

    def edit_top(name, line="// a comment"):
        file = project / "csrc" / name
        file.write_text(f"{line}\n{file.read_text()}")

    edit_top("ops.cpp")
    assert compiled() == {"ops.cpp.o"}
    for name in ("cpu.cpp", "axpy.h"):
        edit_top(name)
        assert compiled() == {"ops.cpp.o", "cpu.cpp.o"}  # ops.cpp has the id of all sources
    edit_top("cpu.cpp", "nonsense")
    compiled(status=1)
    nonsense = project / "csrc" / "cpu.cpp"
    nonsense.write_text(nonsense.read_text().replace("nonsense", ""))
    assert {"ops.cpp.o", "cpu.cpp.o"} <= compiled() < set(objects)
    (record,) = project.parent.glob("home/build/*/objects.json")
    record.write_text(record.read_text().replace("KERNEL_SANITIZE", "KERNEL_OTHER"))
    edit_top("ops.cpp")
    assert compiled() == set(objects)

    # A file that is put back is older than the objects made from the one that it replaces.
    header = project / "csrc" / "axpy.h"
    text, status = header.read_text(), header.stat()
    edit_top("axpy.h")
    assert compiled() == {"ops.cpp.o", "cpu.cpp.o"}
    header.write_text(text)
    os.utime(header, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert compiled() == set(objects)
