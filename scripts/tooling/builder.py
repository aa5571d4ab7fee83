"""The modules that build kernels, which lie beside the kernels: `from tooling.builder import variant`.

They are programs of CMake too and know each other by their bare names, so their folder is on sys.path.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernel_builds/builder"))

import abi_check
import archs
import build_toml
import configure
import later_gpus
import objects
import subset
import toolchain
import toolkits
import variant
from archs import default_archs, find_gpu, gencode, parse_archs
from build_toml import BUILDER, HERE, MACHINES, BuildError, Kernel, read_kernel

__all__ = [
    "BUILDER",
    "HERE",
    "MACHINES",
    "BuildError",
    "Kernel",
    "abi_check",
    "archs",
    "build_toml",
    "configure",
    "default_archs",
    "find_gpu",
    "gencode",
    "later_gpus",
    "objects",
    "parse_archs",
    "read_kernel",
    "subset",
    "toolchain",
    "toolkits",
    "variant",
]
