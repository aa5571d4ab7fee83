"""The build backend that pip calls (PEP 517): setuptools', with kernels and commands in its wheels.

A wheel for Linux on x86-64 or AArch64 has the CPU kernels, which are compiled for it. `kernels`, one of
pip's --config-settings, changes that:

    kernels=build    compile them, or take what scripts/build_kernels has built here (the default)
    kernels=none     leave them out: the wheel is of Python alone (the default on other machines)
    kernels=DIR      take finished builds from DIR/<kernel>/build, as scripts/build_wheels does; with
                     machine=aarch64 those for that machine, and the wheel is for it
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

from tooling.builder import HERE, MACHINES, BuildError
from wheels import archive, contents

TORCH = "torch>=2.10"
TOOLS = ["cmake>=3.24", "jinja2", "kernel-abi-check>=0.14", "kernels>=0.16.2,<0.19", "ninja"]
Settings = "dict[str, str] | None"


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    found = build_meta.get_requires_for_build_wheel()
    if _wanted(config_settings) is None:
        return found
    return [*found, *TOOLS, *([] if torch_folder() else [TORCH])]


def prepare_metadata_for_build_wheel(folder: str, config_settings: Settings = None) -> str:
    name = build_meta.prepare_metadata_for_build_wheel(folder)
    file = Path(folder, name, "METADATA")
    file.write_bytes(contents.for_an_index(file.read_bytes()))
    return name


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    wanted = _wanted(config_settings)  # first: it may be wrong
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary, build_meta.build_wheel(temporary))
        files = archive.read_wheel(plain) | contents.commands()
    info = archive.dist_info(files)
    files[f"{info}/METADATA"] = contents.for_an_index(files[f"{info}/METADATA"])
    tag = "py3-none-any"
    if wanted is not None:
        try:
            machine = (config_settings or {}).get("machine", HERE)
            files |= _kernels(wanted, machine)
        except (contents.UnfitVariant, BuildError) as error:
            raise SystemExit(f"error: {error}") from None
        tag = contents.wheel_tag(machine)
    return archive.write_wheel(Path(wheel_directory), files, tag)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    name = build_meta.build_sdist(sdist_directory)
    archive.rewrite_sdist(Path(sdist_directory, name), {})
    return name


def _wanted(settings: Settings) -> str | None:
    """Returns "build" or a folder of finished builds, or None for a wheel without kernels."""
    here = platform.system(), platform.machine()
    is_known = here[0] == "Linux" and here[1] in MACHINES
    can_build = is_known and platform.libc_ver()[0] == "glibc"
    wanted = (settings or {}).get("kernels", "build" if can_build else "none")
    if wanted == "none":
        return None
    if wanted == "build" and can_build:
        return wanted
    if wanted == "build":
        raise SystemExit(
            f"error: kernels is 'build', but must be 'none' on {' '.join(here)}: kernels are built "
            f"for Linux on {' or '.join(MACHINES)} with glibc"
        )
    if not isinstance(wanted, str) or not Path(wanted).is_dir():
        raise SystemExit(
            f"error: kernels is {wanted!r}, but must be 'build', 'none' or a folder of builds"
        )
    return wanted


def _kernels(wanted: str, machine: str) -> dict[str, bytes]:
    """Returns the CPU kernels' files and the lock, as they lie in the wheel."""
    torch = torch_folder()
    if torch is None:
        raise BuildError(f"{sys.executable} has no torch, but a build needs its headers")
    builds = contents.ROOT / "kernel_builds" if wanted == "build" else Path(wanted)
    if wanted == "build":
        _compile(torch)
    found = contents.finished(builds, torch / "include", machine)
    files = contents.kernels_of(found, "cpu", machine, "flashcell/installed")
    return files | {"flashcell/installed/lock.py": contents.lock_text(contents.lock_of(found))}


def _compile(torch: Path) -> None:
    command = [
        sys.executable,
        contents.ROOT / "scripts/build_kernels",
        "--backend",
        "cpu",
        "--here",
    ]
    with _importable(torch) as environment:
        done = subprocess.run([str(word) for word in command], env=environment)
    if done.returncode:
        raise BuildError(
            "the kernels could not be built (see above). A wheel without them, which runs plain "
            "PyTorch code, is built with --config-settings=kernels=none"
        )


def torch_folder() -> Path | None:
    """Returns the folder of torch here, or in the environment that pip builds this wheel for, which
    it hides; nothing of it is run."""
    spec = importlib.util.find_spec("torch")
    hidden = [Path(sysconfig.get_path(kind), "torch") for kind in ("platlib", "purelib")]
    found = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return next((p for p in [*found, *hidden] if (p / "include/torch/csrc/stable").is_dir()), None)


@contextlib.contextmanager
def _importable(torch: Path) -> Iterator[dict[str, str]]:
    """Yields an environment in which Python finds this torch, though pip hides it."""
    with tempfile.TemporaryDirectory() as folder:
        for part in (torch, *torch.parent.glob("torch-*.dist-info")):
            Path(folder, part.name).symlink_to(part)
        places = [*filter(None, [os.environ.get("PYTHONPATH")]), folder]
        yield os.environ | {"PYTHONPATH": os.pathsep.join(places)}
