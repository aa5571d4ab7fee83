"""Converts CUDA architectures between how users and metadata write them ("9.0a", "10.0+PTX") and
nvcc's flags."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from build_toml import BuildError, Kernel

# kernel-builder's list for CUDA 13, for kernels whose components do not name their own.
DEFAULT_ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")
ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)(\+PTX)?")


def default_archs(kernel: Kernel, cuda: str) -> tuple[str, ...]:
    """Returns the archs that the kernel's components name, as far as CUDA `cuda` has them."""
    named = [arch for c in kernel.components if c.backend == "cuda" for arch in c.archs]
    archs = parse_archs(";".join(named or DEFAULT_ARCHS))
    version = tuple(map(int, cuda.split(".")))
    if version >= (13,):
        return archs
    # 12.8 brought machine code for 10.0 and 12.0. The PTX that later GPUs run is that of the newest
    # arch before these: the nvcc that is fetched for 12.8 ends at 9.0 (toolkits.py).
    machine = [arch.removesuffix("+PTX") for arch in archs]
    before = [arch for arch in machine if _number(arch) < 100]
    last = max((arch for arch in before if arch[-1].isdigit()), key=_number, default=None)
    kept = before if version < (12, 8) else machine
    return tuple(f"{a}+PTX" if a == last and archs != tuple(machine) else a for a in kept)


def parse_archs(text: str) -> tuple[str, ...]:
    """Parses '8.0;9.0a;10.0+PTX' to a sorted tuple of archs without repetitions."""
    archs = {}
    for arch in filter(None, re.split(r"[;,\s]+", text)):
        match = ARCH.fullmatch(arch)
        if match is None:
            raise BuildError(
                f"CUDA arch is {arch!r}, but must be a capability such as 8.0, with 'a' or 'f' for "
                "its own instructions (9.0a) and +PTX for later devices (10.0+PTX)"
            )
        archs[arch] = (int(match[1]), int(match[2]), match[3], bool(match[4]))
    if not archs:
        raise BuildError(f"CUDA archs are {text!r}, but must name at least one, such as '9.0a'")
    return tuple(sorted(archs, key=lambda arch: archs[arch]))


def gencode(archs: tuple[str, ...]) -> list[str]:
    """Returns nvcc's flags: machine code for every arch, and PTX for those with +PTX."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def find_gpu(python: Path) -> tuple[str, str] | None:
    """Returns the first GPU's arch ("9.0a") and torch's CUDA, or None if torch can use no GPU."""
    if not Path("/dev/nvidiactl").exists():
        return None
    code = (
        "import torch; c = torch.cuda; "
        "print(*((*c.get_device_capability(), torch.version.cuda) if c.is_available() else ()))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        print("this machine has a GPU, but torch cannot use it", flush=True)
        return None
    major, minor, cuda = done.stdout.split()
    return f"{major}.{minor}a" if (major, minor) == ("9", "0") else f"{major}.{minor}", cuda


def _number(arch: str) -> int:
    """Returns 90 for 9.0a."""
    return int(arch.rstrip("af").replace(".", ""))
