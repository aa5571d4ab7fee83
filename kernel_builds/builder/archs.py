"""Converts CUDA architectures between how users and metadata write them ("9.0a", "10.0+PTX") and
nvcc's flags."""

from __future__ import annotations

import re

from build_toml import BuildError, Kernel

# kernel-builder's list for CUDA 13, for kernels whose components do not name their own.
DEFAULT_ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")
ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)(\+PTX)?")


def default_archs(kernel: Kernel) -> tuple[str, ...]:
    """Returns the archs that the kernel's components name."""
    named = [arch for c in kernel.components if c.backend == "cuda" for arch in c.archs]
    return parse_archs(";".join(named or DEFAULT_ARCHS))


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
