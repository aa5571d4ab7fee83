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

from build_toml import BuildError

CMAKE_MIN = (3, 24)
COMPILER_MIN = {"g++": (11,), "clang++": (14,)}
# The compiler that is installed if there is none: NVIDIA's wheels, which together are a CUDA
# toolkit.
WHEEL_CUDA = "13.0"
CUDA_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str  # "13.0"

    def check_archs(self, archs: tuple[str, ...]) -> None:
        """Raises unless this compiler knows the archs; its own error message would name a flag, not
        the arch."""
        known = set(re.findall(r"sm_(\w+)", _output(self.path, "--list-gpu-code")))
        for arch in archs:
            number = arch.removesuffix("+PTX").replace(".", "")
            if number.rstrip("af") not in known:
                raise BuildError(
                    f"CUDA arch {arch} is unknown to nvcc {self.version} ({self.path}), "
                    f"which compiles for {', '.join(sorted(known, key=int))}"
                )

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
    kind = "clang++" if "clang" in _output(path, "--version") else "g++"
    version = _version(_output(path, "-dumpfullversion" * (kind == "g++") or "-dumpversion"))
    if version < COMPILER_MIN[kind]:
        raise BuildError(
            f"{path} is {kind} {_dotted(version)}, but must be {_dotted(COMPILER_MIN[kind])} or later"
        )
    for tool in ("nm", "readelf", "strip", "c++filt"):
        _find(tool, "your system's package binutils")
    return path


def check_torch(python: Path, floor: str) -> None:
    """Raises if `python`'s torch is older than the stable ABI that is built for. Does not import
    torch."""
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


def find_nvcc(home: Path, choice: str = "auto", install: bool = True) -> Nvcc:
    """Returns the nvcc at the path `choice`; for "auto" the machine's, else the pinned wheels'; for
    "wheels" the wheels'."""
    if choice not in ("auto", "wheels"):
        if not Path(choice).is_file():
            raise BuildError(f"--nvcc is {choice!r}, but there is no such file")
        return _nvcc(Path(choice))
    if choice == "auto" and (path := machine_nvcc()) is not None:
        return _nvcc(path)
    root = home / f"cuda-{WHEEL_CUDA}"
    path = root / "nvidia" / "cu13" / "bin" / "nvcc"
    if not path.is_file():
        if not install:
            raise BuildError(
                "nvcc is not on this machine (PATH, $CUDA_HOME, /usr/local/cuda), and --here "
                "installs nothing: leave --here out to fetch NVIDIA's compiler wheels"
            )
        _install_wheels(root)
    return _nvcc(path)


def cuda_version(home: Path, choice: str) -> str:
    """Returns the version that find_nvcc would find, without installing anything."""
    if choice == "wheels" or (choice == "auto" and machine_nvcc() is None):
        return WHEEL_CUDA
    return find_nvcc(home, choice, install=False).version


def machine_nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", os.defpath), *(f"{h}/bin" for h in homes if h)]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found) if found else None


def _nvcc(path: Path) -> Nvcc:
    match = re.search(r"release (\d+\.\d+)", _output(path, "--version"))
    if match is None:
        raise BuildError(f"{path} is not NVIDIA's nvcc: --version names no release")
    return Nvcc(path, match[1])


def _install_wheels(root: Path) -> None:
    """Installs pip's wheels in a folder of their own, and makes it look like an installed toolkit."""
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"fetching nvcc {WHEEL_CUDA} (NVIDIA's wheels, about 110 MB) to {root}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
    try:
        subprocess.run([*pip, *CUDA_WHEELS], check=True)
    except subprocess.CalledProcessError:
        raise BuildError(
            f"pip could not install {', '.join(CUDA_WHEELS)} (see above): "
            "without a network, put an nvcc on PATH or name one with --nvcc"
        ) from None
    toolkit = partial / "nvidia" / "cu13"
    (toolkit / "lib64").symlink_to("lib")
    (toolkit / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    shutil.rmtree(root, ignore_errors=True)
    partial.rename(root)


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
