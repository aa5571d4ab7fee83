"""Tests that the first two commands of the README say what is missing on a machine that lacks it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tooling import environment as python_environment
from tooling import test as test_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path):
    """Runs a script with a PATH of chosen programs and an empty state folder."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(script: str, *arguments: str, have: tuple[str, ...] = ()):
        for name in ("sh", "env", *have):
            target = sys.executable if name == "python3" else shutil.which(name)
            (programs / name).symlink_to(target)
        environment = {"PATH": str(programs), "FLASHCELL_HOME": str(tmp_path / "home")}
        command = [ROOT / "scripts" / script, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    run.programs, run.home = programs, tmp_path / "home"
    return run


@pytest.mark.parametrize("script", ["demo", "test"])
def test_without_python(machine, script):
    done = machine(script)
    assert done.returncode == 1
    assert f"{script}: Python 3.10 or newer is needed; none was found on PATH." in done.stderr


@pytest.mark.parametrize("script", ["demo", "test"])
def test_with_an_old_python(machine, script):
    old = machine.programs / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.8;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = machine(script)
    assert done.returncode == 1
    assert "Python 3.10 or newer is needed; python3 is 3.8;" in done.stderr


@pytest.mark.parametrize("script", ["demo", "test"])
def test_without_a_compiler(machine, script):
    done = machine(script, have=("python3",))
    assert done.returncode == 1
    assert f"{script}: no C++ compiler: g++ is not on PATH." in done.stderr
    assert "apt install g++" in done.stderr
    assert not machine.home.exists()  # reported before anything is made or downloaded


def test_here_names_what_the_present_python_lacks(machine, tmp_path):
    done = machine("demo", "--here", have=("g++",))
    assert done.returncode == 1  # there is no Python yet
    bare = machine.programs / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/demo", "--here"],
        env={"PATH": str(machine.programs), "FLASHCELL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "has no flashcell" in done.stderr
    assert "-m pip install -c constraints.txt -e '.'" in done.stderr


def test_a_state_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [ROOT / "scripts/demo", "--home", tmp_path / "file"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"cannot write the state folder {tmp_path}/file" in done.stderr


def test_a_full_disk_is_said_before_anything_is_installed(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SystemExit, match=r"has 0\.9 GiB free, the environment needs 3 GiB"):
        python_environment.prepare(tmp_path, [])


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying after connection broken", "a package index could not be reached"),
        ("ERROR: No matching distribution found for torch", "an index lacks a package for Python"),
    ],
)
def test_a_failed_pip_is_quoted_and_explained(tmp_path, said, meaning):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{said}"\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=meaning) as error:
        python_environment._pip(python, ["install", "torch"], tmp_path / "pip.log", required=True)
    assert said in str(error.value)


def options_of_several():
    """Returns (script, name, keywords) of every option that takes several values at once."""
    for file in sorted((ROOT / "scripts").iterdir()):
        if not file.is_file() or "nargs=" not in (source := file.read_text(encoding="utf-8")):
            continue
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            words = {k.arg: ast.unparse(k.value) for k in call.keywords}
            name = ast.unparse(call.args[0]).strip("'") if call.args else ""
            if name.startswith("--") and words.get("nargs") in ("'+'", "'*'"):
                yield file.name, name, words


def test_repeated_options_add_up():
    """argparse keeps only the last use's values, and `extend` adds them to a default."""
    found = list(options_of_several())
    assert {("build_kernels", "--kernel"), ("bench_ops", "--case")} < {f[:2] for f in found}
    wrong = [
        f for f in found if f[2].get("action") != "'extend'" or f[2].get("default", "[]") != "[]"
    ]
    assert not wrong
    command = [sys.executable, ROOT / "scripts/build_kernels", "--check"]
    command += ["--backend", "cpu", "--backend", "cuda", "--kernel", "tfla"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "cpu cuda" in done.stderr, done.stderr


def test_a_change_runs_the_fast_tier_and_the_week_all():
    flow = yaml.safe_load((ROOT / ".github/workflows/cpu.yml").read_text(encoding="utf-8"))
    when, jobs = flow[True], flow["jobs"]  # YAML 1.1 reads "on" as true
    tiers = {step["run"]: step["if"] for step in jobs["test"]["steps"] if "run" in step}
    assert set(tiers) == {".ci/run", "scripts/test --all"}
    events = {run: set(re.findall(r"'(\w+)'", said)) for run, said in tiers.items()}
    assert events[".ci/run"] == {"push", "pull_request"}
    assert set(when) - events[".ci/run"] == {"schedule", "workflow_dispatch"}
    assert events["scripts/test --all"] == {"schedule", "workflow_dispatch"}


@pytest.mark.parametrize(
    ("option", "cuda", "slow"),
    [("", None, False), ("ci", "--check", False), ("all", "--out", True)],
)
def test_what_each_tier_runs(tmp_path, option, cuda, slow):
    args = SimpleNamespace(**{"all": False, "ci": False, "jobs": 2, "pytest": [], option: True})
    steps = dict(test_command.run_steps(args, tmp_path))
    versions = ["versions"] if option == "ci" else []
    assert list(steps) == [
        "build",
        *(["build cuda"] if cuda else []),
        *(["build cuda 12"] if option == "all" else []),
        "repository",
        *versions,
        "tests",
    ]
    assert cuda is None or cuda in steps["build cuda"]
    assert ("not slow" not in steps["tests"]) == slow


def test_an_environment_is_made_once_and_again_when_the_pins_change(monkeypatch, tmp_path):
    made = []
    (tmp_path / "venv/bin").mkdir(parents=True)

    def make_venv(venv):
        made.append("venv")
        (venv / "bin/python").touch()

    monkeypatch.setattr(python_environment, "_make_venv", make_venv)
    monkeypatch.setattr(python_environment, "_pip", lambda *_, **__: made.append("pip") or True)
    for extras, steps in (
        ([], ["venv", "pip", "pip"]),
        ([], []),
        (["dev"], ["pip", "pip"]),  # existing packages are kept and added to
        ([], []),
    ):
        made.clear()
        assert python_environment.prepare(tmp_path, extras) == tmp_path / "venv/bin/python"
        assert made == steps, extras
    monkeypatch.setattr(python_environment, "_key", lambda: "another place, other pins")
    made.clear()
    python_environment.prepare(tmp_path, [])
    assert made == ["venv", "pip", "pip"]
