"""Fixtures: a kernel small enough to build in a second, a Hub that has it, and fresh processes that
load it.

The kernel calls itself fused-rnn, so that what falls back finds the wheel's reference. The loader
is taken without the rest of the package: its processes start without transformers.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import load_command
from flashcell.hub.lock_format import lock_source, read_lock
from flashcell.utils.whole_file import write_file
from tooling.builder import variant

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
LOADER = [
    *(
        "hub/checkout",
        "hub/installed",
        "hub/kernel_loader",
        "hub/kernel_sources",
        "hub/kernel_variants",
        "hub/kernel_files",
        "hub/kernel_import",
        "hub/download",
    ),
    *("hub/lock_format", "hub/kernels_lock", "utils/whole_file"),
]
VARIANT = "torch-stable-abi210-cpu-x86_64-linux"
BUILD_TOML = """
[general]
name = "fused-rnn"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]
hub = { repo-id = "flashcell/fused-rnn" }
[torch]
src = ["csrc/ops.c"]
stable-abi = "2.10"
"""
LIBRARY = """
#define Py_LIMITED_API 0x03090000
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy", 0, 0, 0};
__attribute__((visibility("default"))) PyObject *PyInit_%s(void) { return PyModule_Create(&module); }
"""
PACKAGE = {
    "__init__.py": "from ._ops import BACKEND\nfrom .cells import lstm\n",
    "cells.py": "def lstm(x):\n    return 2 * x\n",
}


@pytest.fixture(scope="session")
def publish_kernels():
    """The script scripts/publish_kernels as a module."""
    return load_command("publish_kernels")


@pytest.fixture(scope="session")
def local_hub():
    """The module of the local Hub."""
    from tooling import local_hub

    return local_hub


@pytest.fixture
def hub(local_hub, tmp_path):
    hub = local_hub.LocalHub(tmp_path / "store").start()
    yield hub
    hub.stop()


@dataclass(frozen=True)
class Project:
    """A kernel project, with functions to build and publish it."""

    script: object
    root: Path

    def build(self, source: str = "") -> Path:
        kernel = self.script.read_kernel(self.root)
        identifier, out = kernel.id("cpu"), self.root / "build"
        (self.root / "library.c").write_text(LIBRARY % identifier + source)
        flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-s"]
        include = sysconfig.get_paths()["include"]
        library = self.root / "library.so"
        command = ["gcc", *flags, f"-I{include}", self.root / "library.c", "-o", library]
        subprocess.run(command, check=True)
        variant.assemble(kernel, "universal", "torch-universal", out)
        (out / "CARD.md").write_text("a card")
        return variant.assemble(kernel, "cpu", VARIANT, out, library)

    def publish(self, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
        command = ["publish_kernels", "--kernel", str(self.root), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        self.script.main()


@pytest.fixture(scope="session")
def built(publish_kernels, tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("kernel") / "fused-rnn"
    package = root / "torch-ext/fused_rnn"
    package.mkdir(parents=True)
    (root / "csrc").mkdir()
    (root / "csrc/ops.c").touch()
    (root / "build.toml").write_text(BUILD_TOML)
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    project = Project(publish_kernels, root)
    project.build()
    return project


@pytest.fixture
def project(built, tmp_path) -> Project:
    """A copy of the project that a test may change."""
    return Project(built.script, Path(shutil.copytree(built.root, tmp_path / "fused-rnn")))


@pytest.fixture(scope="session")
def seeded_hub(built, local_hub, tmp_path_factory) -> Path:
    """A store to which the kernel was published over HTTP, and its lock."""
    folder = tmp_path_factory.mktemp("hub")
    hub = local_hub.LocalHub(folder / "store").start()
    with pytest.MonkeyPatch.context() as patch:
        built.publish(patch, "--endpoint", hub.url, "--lock", folder / "lock.py")
    hub.stop()
    return folder


@pytest.fixture(scope="session")
def processes():
    """Starts child.py with an environment that excludes the user's own settings."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_"))}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, CHILD], env=variables, stdin=pipe, stdout=pipe, text=True
    )
    yield server
    server.stdin.close()
    server.wait(timeout=10)


@dataclass
class Running:
    """A process started by child.py."""

    pid: int
    out: Path

    def finish(self) -> list[dict]:
        deadline = time.monotonic() + 120
        while not self.out.exists():
            assert time.monotonic() < deadline, "the process did not finish"
            time.sleep(0.02)
        result = json.loads(self.out.read_text())
        assert isinstance(result, list), result
        return result


@dataclass
class Chain:
    """A Hub with the published kernel, its lock, and a cache that is empty at first."""

    hub: object
    folder: Path
    processes: subprocess.Popen
    variant = VARIANT

    def start(self, *steps: dict, **environment: object) -> Running:
        """Starts a process that takes the steps (child.py)."""
        variables = {
            "HF_HOME": str(self.folder / "cache"),
            "HF_ENDPOINT": self.hub.url,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "FLASHCELL_LOCK": str(self.folder / "lock.py"),
        }
        out = self.folder / f"{time.monotonic_ns()}.json"
        text = {k: v if v is None else str(v) for k, v in environment.items()}
        request = {"environment": variables | text}
        request |= {"steps": steps or [{}], "path": str(self.folder), "out": str(out)}
        self.processes.stdin.write(json.dumps(request) + "\n")
        self.processes.stdin.flush()
        return Running(int(self.processes.stdout.readline()), out)

    def load(self, *steps: dict, **environment: object) -> list[dict]:
        return self.start(*steps, **environment).finish()

    def edit_lock(self, **fields: object) -> None:
        lock = read_lock(self.folder / "lock.py")
        lock["kernels"]["fused-rnn"].update(fields)
        write_file(self.folder / "lock.py", lock_source(lock, "lock.py"))

    @property
    def cached(self) -> Path:
        """The variant's directory in the cache."""
        return next(self.folder.glob(f"cache/hub/kernels--*/snapshots/*/build/{VARIANT}"))

    def downloads(self) -> list[str]:
        """The files that the Hub has sent."""
        gets = [r.split() for r in self.hub.requests if r.startswith("GET /kernels/")]
        return [path.rpartition("/")[2] for _, path, _ in gets]


@pytest.fixture
def chain(seeded_hub, local_hub, processes, tmp_path):
    folder = Path(shutil.copytree(seeded_hub, tmp_path / "chain"))
    flat = folder / "flat"
    (flat / "kernels").mkdir(parents=True)
    for part in {name.split("/")[0] for name in LOADER}:
        (flat / part).mkdir()
    for name in LOADER:
        (flat / f"{name}.py").symlink_to(ROOT / f"modeling/{name}.py")
    package = ROOT / "kernel_builds/fused-rnn/torch-ext/fused_rnn"
    (flat / "kernels/fused_rnn").symlink_to(package)
    hub = local_hub.LocalHub(folder / "store").start()
    yield Chain(hub, folder, processes)
    hub.stop()
