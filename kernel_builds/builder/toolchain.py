"""Finds the programs that a build runs: cmake, ninja, g++, torch's headers and, for CUDA, an nvcc."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import toolkits
from build_toml import BuildError

CMAKE_MIN = (3, 24)
COMPILER_MIN = {"g++": (11,), "clang++": (14,)}


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str  # "13.0", the version of the toolkit

    def check_archs(self, archs: tuple[str, ...]) -> None:
        """Raises unless this compiler knows the archs; its own error message would name a flag, not
        the arch."""
        ptx = [arch for arch in archs if arch.endswith("+PTX")]
        for wanted, option, prefix, does in (
            (archs, "--list-gpu-code", "sm_", "compiles for"),
            (ptx, "--list-gpu-arch", "compute_", "writes PTX for"),
        ):
            known = set(re.findall(rf"{prefix}(\w+)", _output(self.path, option))) if wanted else ()
            for arch in wanted:
                if arch.removesuffix("+PTX").rstrip("af").replace(".", "") not in known:
                    raise BuildError(
                        f"CUDA arch {arch} is unknown to nvcc {self.version} ({self.path}), "
                        f"which {does} {', '.join(sorted(known, key=int))}"
                    )

    def check_host(self, gxx: Path) -> None:
        """Raises if nvcc refuses the host's compiler; its own message would suggest a flag."""
        if _nvcc(self.path).version != toolkits.COMPILER_12:
            return
        kind, version = _compiler(gxx)
        if version[:1] > (most := toolkits.HOST_MAX_12[kind]):
            raise BuildError(
                f"{gxx} is {kind} {_dotted(version)}, but nvcc {toolkits.COMPILER_12}, which "
                f"compiles for CUDA {self.version}, takes {kind} {_dotted(most)} or earlier: "
                "name one with CXX"
            )

    def cross_flags(self, runtime: Path) -> str:
        """Returns flags to compile for another machine: with this machine's headers, which serve all
        but which nvcc would seek in that machine's folder, and the CUDA `runtime` in a folder."""
        command = [self.path, "--dryrun", "-c", "-x", "cu", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True).stderr
        found = re.findall(r"^#\$ (?:SYSTEM_)?INCLUDES=(.*)$", said, re.MULTILINE)
        return " ".join([*(flags.strip() for flags in found), f"-L{runtime}"])

    def check_version(self, least: tuple[int, ...], what: str) -> None:
        if _version(self.version) < least:
            raise BuildError(
                f"{what} needs nvcc {_dotted(least)} or later, but {self.path} is {self.version}"
            )


def find_cmake() -> Path:
    path = _find("cmake", "pip install 'cmake>=3.24'")
    version = _version(_output(path, "--version"))
    if version < CMAKE_MIN:
        raise BuildError(f"{path} has version {_dotted(version)}, but must have 3.24 or later")
    return path


def find_ninja() -> Path:
    return _find("ninja", "pip install ninja")


def ninja_status(ninja: Path) -> dict[str, str]:
    """Returns the variable that makes ninja say how much is done and how long the rest takes."""
    has_estimate = _version(_output(ninja, "--version")) >= (1, 12)
    return {"NINJA_STATUS": "[%f of %t, %W left] " if has_estimate else "[%f of %t] "}


def find_gxx() -> Path:
    """Returns $CXX or g++: a g++ or clang++ on GCC's libraries, the only ones the ABI checks know."""
    path = _find(os.environ.get("CXX") or "g++", "your system's package g++ (build-essential)")
    kind, version = _compiler(path)
    if version < COMPILER_MIN[kind]:
        raise BuildError(
            f"{path} is {kind} {_dotted(version)}, but must be {_dotted(COMPILER_MIN[kind])} or later"
        )
    for tool in ("nm", "readelf", "strip", "c++filt"):
        _find(tool, "your system's package binutils")
    return path


def find_cross_gxx(machine: str) -> Path:
    """Returns the g++ for another machine, as Debian and Ubuntu name it; $CXX is for this one."""
    package = f"g++-{machine.replace('_', '-')}-linux-gnu"
    path = _find(
        f"{machine}-linux-gnu-g++", f"your system's package {package}, on Debian and Ubuntu"
    )
    version = _version(_output(path, "-dumpfullversion"))
    if version < COMPILER_MIN["g++"]:
        least = _dotted(COMPILER_MIN["g++"])
        raise BuildError(f"{path} is g++ {_dotted(version)}, but must be {least} or later")
    return path


def check_torch(python: Path, floor: str) -> str:
    """Returns the version of `python`'s torch, and raises if it is older than the stable ABI that is
    built for. Does not import torch."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        version = _output(python, "-c", code).strip()
    except (OSError, subprocess.CalledProcessError):
        raise BuildError(
            f"{python} has no torch, but a build needs its headers: "
            "install it there, or name another Python with --python"
        ) from None
    if _version(version)[:2] < _version(floor):
        raise BuildError(f"{python} has torch {version}, but the build needs {floor} or later")
    return version


def check_helpers() -> None:
    """Checks what comes as wheels, before minutes are spent compiling, and names all that is missing."""
    wheels = {"kernels": "kernels", "kernel_abi_check": "kernel-abi-check", "jinja2": "jinja2"}
    missing = [
        wheel for module, wheel in wheels.items() if importlib.util.find_spec(module) is None
    ]
    missing += [name for name in ("cmake", "ninja") if _which(name) is None]
    if missing:
        raise BuildError(
            f"{sys.executable} has no {', '.join(missing)}, but builds need "
            f"{'it' if len(missing) == 1 else 'them'}: "
            f"pip install -c constraints.txt {' '.join(missing)}"
        )


def find_nvcc(
    home: Path, choice: str = "auto", cuda: str | None = None, install: bool = True
) -> Nvcc:
    """Returns the nvcc of CUDA `cuda`: at the path `choice`, for "auto" the machine's if it has
    that version, else, and for "wheels", that of a toolkit that is fetched."""
    if choice not in ("auto", "wheels"):
        if not Path(choice).is_file():
            raise BuildError(f"--nvcc is {choice!r}, but there is no such file")
        nvcc = _nvcc(Path(choice))
        if cuda not in (None, nvcc.version):
            raise BuildError(f"--cuda is {cuda!r}, but --nvcc, {choice}, is of CUDA {nvcc.version}")
        return nvcc
    if choice == "auto" and (path := machine_nvcc()) is not None:
        nvcc = _nvcc(path)
        if cuda in (None, nvcc.version):
            return nvcc
    cuda = cuda or toolkits.DEFAULT
    if cuda not in toolkits.VERSIONS:
        raise BuildError(
            f"--cuda is {cuda!r}, but can be fetched for {', '.join(toolkits.VERSIONS)} only: for "
            "another version name its nvcc with --nvcc"
        )
    path = toolkits.nvcc(home, cuda)
    if not path.is_file():
        if not install:
            raise BuildError(
                f"nvcc {cuda} is not on this machine (PATH, $CUDA_HOME, /usr/local/cuda), and "
                "--here installs nothing: leave --here out to fetch a toolkit"
            )
        toolkits.fetch(home, cuda)
    return Nvcc(path, cuda)


def cuda_version(home: Path, choice: str, cuda: str | None = None) -> str:
    """Returns the version that find_nvcc would find, without installing anything."""
    if cuda is None and (choice == "wheels" or (choice == "auto" and machine_nvcc() is None)):
        return toolkits.DEFAULT
    if cuda in toolkits.VERSIONS and choice in ("auto", "wheels"):
        return cuda
    return find_nvcc(home, choice, cuda, install=False).version


def cuda_for(torch_cuda: str, choice: str) -> str | None:
    """Returns the version to build for, so that a torch for `torch_cuda` loads it; None: nvcc's."""
    own, fits = (
        _version(torch_cuda)[:2],
        lambda cuda: _version(cuda)[0] == own[0] and _version(cuda) <= own,
    )
    if choice not in ("auto", "wheels"):
        return None
    if choice == "auto" and (path := machine_nvcc()) is not None and fits(_nvcc(path).version):
        return None
    fitting = [version for version in toolkits.VERSIONS if fits(version)]
    if not fitting:
        raise BuildError(
            f"torch is built for CUDA {torch_cuda}, but an nvcc can be fetched for "
            f"{', '.join(toolkits.VERSIONS)} only: name one of CUDA {torch_cuda} with --nvcc"
        )
    return max(fitting, key=_version)


def machine_nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", os.defpath), *(f"{h}/bin" for h in homes if h)]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found) if found else None


def _compiler(path: Path) -> tuple[str, tuple[int, ...]]:
    """Returns what a compiler is, "g++" or "clang++", and its version."""
    kind = "clang++" if "clang" in _output(path, "--version") else "g++"
    return kind, _version(_output(path, "-dumpfullversion" * (kind == "g++") or "-dumpversion"))


def _nvcc(path: Path) -> Nvcc:
    match = re.search(r"release (\d+\.\d+)", _output(path, "--version"))
    if match is None:
        raise BuildError(f"{path} is not NVIDIA's nvcc: --version names no release")
    return Nvcc(path, match[1])


def _which(program: str) -> str | None:
    """Finds a program on PATH or beside the running Python, where pip puts programs."""
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return shutil.which(program, path=os.pathsep.join(folders))


def _find(program: str, remedy: str) -> Path:
    found = _which(program)
    if found is None:
        raise BuildError(f"{program} is not on this machine, but building needs it: {remedy}")
    return Path(found)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _version(text: str) -> tuple[int, ...]:
    match = re.search(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
