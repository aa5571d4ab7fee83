"""Fetches CUDA toolkits into the state folder, at pinned versions.

NVIDIA's wheels of CUDA 13 are a whole toolkit. Those of CUDA 12 hold the assembler, the headers and
the runtime, but no nvcc, which Debian packages for 12.4. So the toolkits 12.6 and 12.8 are nvcc and
headers of 12.4 with the assembler (ptxas) of their own version, which makes the machine code.
later_gpus.py says how 12.8 compiles for GPUs that nvcc 12.4 does not know.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import later_gpus
from build_toml import BUILDER, HERE, BuildError

DEFAULT = "13.0"
WHEELS_13 = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
COMPILER_12 = "12.4"
HOST_MAX_12 = {"g++": (13,), "clang++": (17,)}  # its crt/host_config.h refuses later ones
# Headers must be of nvcc's version. A library runs with the runtime that it links to, or a later.
HEADERS_12 = (
    "nvidia-cuda-nvcc-cu12==12.4.131",
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-cccl-cu12==12.4.127.post1",
)
ASSEMBLERS_12 = {
    "12.6": "nvidia-cuda-nvcc-cu12==12.6.85",
    "12.8": "nvidia-cuda-nvcc-cu12==12.8.93",
}
# The program that puts code into objects, of 13.0: it compresses as 12.8 does, to two thirds of
# what 12.4 leaves or less, and drivers of CUDA 12.4 and later unpack that; and with code for 10.0
# and 12.0 it writes the attributes that NVIDIA's own libraries of 12.8 have there; 12.4 does not.
FATBINARY_12 = "nvidia-cuda-nvcc==13.0.88"
VERSIONS = (*ASSEMBLERS_12, DEFAULT)


@dataclass(frozen=True)
class Package:
    """A package of Debian."""

    name: str
    version: str
    suite: str
    component: str
    sha256: str


NVCC_12 = Package(
    "nvidia-cuda-toolkit",
    "12.4.131~12.4.1-2",
    "trixie",
    "non-free",
    "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319",
)
PROFILE = """
TOP = $(_HERE_)/..
PATH += $(TOP)/nvvm/bin:$(_HERE_):
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
"""


def nvcc(home: Path, version: str) -> Path:
    """Returns where the nvcc of a fetched toolkit is, or will be."""
    root = home / f"cuda-{version}"
    return root / ("nvidia/cu13/bin/nvcc" if version == DEFAULT else "bin/nvcc")


def fetch(home: Path, version: str) -> None:
    """Makes a toolkit in a folder beside its place, then renames it."""
    if version != DEFAULT and platform.machine() != "x86_64":
        raise BuildError(
            f"CUDA {version} can be fetched for x86_64 only, but this machine is "
            f"{platform.machine()}: name an nvcc of that version with --nvcc"
        )
    root = home / f"cuda-{version}"
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    size = "110 MB" if version == DEFAULT else "210 MB"
    print(f"fetching a CUDA {version} toolkit (about {size}) to {root}", flush=True)
    if version == DEFAULT:
        _install_wheels(WHEELS_13, partial)
        toolkit = partial / "nvidia" / "cu13"
        (toolkit / "lib64").symlink_to("lib")
        (toolkit / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    else:
        _assemble(partial, version)
    shutil.rmtree(root, ignore_errors=True)
    partial.rename(root)


def runtime(home: Path, version: str, machine: str, install: bool = True) -> Path:
    """Returns a folder with the CUDA runtime of `version` for another machine, whose code nvcc links."""
    folder = home / f"cudart-{version}-{machine}"
    if folder.is_dir():
        return folder
    major = version.partition(".")[0]
    pinned = WHEELS_13 if major == "13" else HEADERS_12
    (wheel,) = (name for name in pinned if name.startswith("nvidia-cuda-runtime"))
    if not install:
        raise BuildError(
            f"the state folder has no CUDA runtime for {machine}, and --here installs nothing: leave "
            f"--here out to fetch {wheel}"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"fetching {wheel} for {machine} to {folder}", flush=True)
    _install_wheels((wheel,), partial / "wheel", machine)
    for file in (partial / "wheel").glob("nvidia/*/lib/libcuda*"):
        shutil.move(file, partial)
    shutil.rmtree(partial / "wheel")
    _complete(partial, major)
    partial.rename(folder)
    return folder


def _complete(lib: Path, major: str) -> None:
    """Adds what linkers look for and wheels lack."""
    (lib / "libcudart.so").symlink_to(f"libcudart.so.{major}")
    # CMake's first test links these two, which our libraries do not need.
    for name, content in (("cudart_static", b"INPUT(libcudart.so)\n"), ("cudadevrt", b"!<arch>\n")):
        if not (lib / f"lib{name}.a").exists():
            (lib / f"lib{name}.a").write_bytes(content)


def _assemble(root: Path, version: str) -> None:
    """Puts a CUDA 12 toolkit together."""
    parts = root / "parts"
    _install_wheels(HEADERS_12, parts / "headers")
    _install_wheels((ASSEMBLERS_12[version], FATBINARY_12), parts / "assembler")
    _extract(NVCC_12, parts / "debian")
    headers, debian = parts / "headers/nvidia", parts / "debian/usr"
    programs = debian / "lib/nvidia-cuda-toolkit/bin"
    for package in ("cuda_nvcc", "cuda_runtime", "cuda_cccl"):
        shutil.copytree(headers / package / "include", root / "include", dirs_exist_ok=True)
    for folder in ("bin", "lib", "nvvm/bin"):
        (root / folder).mkdir(parents=True)
    for name in ("cudafe++", "nvlink"):
        shutil.copy(debian / "bin" / name, root / "bin")
    shutil.copy(programs / "nvcc", root / "bin")
    shutil.copy(programs / "cicc", root / "nvvm/bin")
    shutil.copytree(programs / "crt", root / "bin/crt")
    shutil.copytree(headers / "cuda_nvcc/nvvm/libdevice", root / "nvvm/libdevice")
    for package, name in (("cuda_nvcc", "ptxas"), ("cu13", "fatbinary")):
        shutil.copy(parts / "assembler/nvidia" / package / "bin" / name, root / "bin")
    (root / "bin/nvcc.profile").write_text(PROFILE)
    shutil.copy(headers / "cuda_runtime/lib/libcudart.so.12", root / "lib")
    _complete(root / "lib", "12")
    (root / "lib64").symlink_to("lib")
    for name, real in later_gpus.REAL.items():
        if version == "12.8" or name == "fatbinary":
            (root / "bin" / name).rename(root / "bin" / real)
            shutil.copy(BUILDER / "later_gpus.py", root / "bin" / name)
    for file in (root / "bin").iterdir():
        file.chmod(0o755)  # wheels and copies lose it
    shutil.rmtree(parts)


def _install_wheels(wheels: tuple[str, ...], target: Path, machine: str = HERE) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    if machine != HERE:
        tags = (f"manylinux2014_{machine}", f"manylinux_2_17_{machine}")
        pip += ["--only-binary=:all:", *(f"--platform={tag}" for tag in tags)]
    try:
        subprocess.run([*pip, *wheels], check=True)
    except subprocess.CalledProcessError:
        raise BuildError(
            f"pip could not install {', '.join(wheels)} (see above): "
            "without a network, put an nvcc on PATH or name one with --nvcc"
        ) from None


def _extract(package: Package, target: Path) -> None:
    """Downloads a package with apt, from this machine's mirror of Debian, and unpacks it.

    apt gets a folder of its own, so the machine's package lists stay as they are."""
    mirror = debian_mirror("CUDA 12's nvcc", "name an nvcc of CUDA 12 with --nvcc")
    folder = target / "apt"
    (folder / "state/lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} "
        f"{package.suite} {package.component}\n"
    )
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list"; Dir::Etc::sourceparts "/dev/null";\n'
        f'Dir::State "{folder}/state"; Dir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache"; APT::Architecture "amd64"; APT::Sandbox::User "";\n'
        'Acquire::Languages "none";\n'
    )
    environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}
    wanted = f"{package.name}={package.version}"
    try:
        for command in (["apt-get", "-qq", "update"], ["apt-get", "-qq", "download", wanted]):
            subprocess.run(command, cwd=folder, env=environment, check=True)
    except subprocess.CalledProcessError:
        raise BuildError(
            f"apt could not download {wanted} (see above): name an nvcc of CUDA 12 with --nvcc"
        ) from None
    (file,) = folder.glob("*.deb")
    check_sha256(file, package.sha256)
    subprocess.run(["dpkg-deb", "--extract", file, target], check=True)


def check_sha256(file: Path, expected: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != expected:
        raise BuildError(f"{file.name} has sha256 {found}, but must have {expected}: do not use it")


def debian_mirror(what: str, instead: str) -> str:
    """Returns the URL of the first Debian mirror among apt's sources; the error says `what` comes from
    there, and what to do `instead`."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    said = ""
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for url in said.split():
        if url.rstrip("/").endswith("/debian"):
            return url
    raise BuildError(
        f"{what} comes from Debian, but apt on this machine has no mirror of Debian: {instead}"
    )
