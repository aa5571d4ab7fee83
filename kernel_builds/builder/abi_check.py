"""Checks one unstripped .so before it may be published, prints what is wrong, and exits with the
number of problems.

The symbols that it imports must exist on every manylinux_2_28 system, in Python's limited API
3.9, and in torch's stable ABI at the oldest supported version. It may depend on torch and CUDA
only, must not search for libraries in the builder's directories, and may export only its
module's entry point. A CUDA library must hold machine code for exactly the architectures that it
claims, and need the runtime of its own CUDA; and every library code for the machine that it claims.

    abi_check.py LIBRARY --machine x86_64 --stable-abi 2.10 --torch-include DIR
                 --kernel kernel_builds/tfla [--archs 9.0a,10.0+PTX --cuda 13.0]
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from build_toml import read_kernel

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
SYMBOL_LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ["torch", "torch_cpu", r"stdc\+\+", "gcc_s", "m", "c", "pthread", "dl"]
# Imports without a version come from Python, torch's C shim, the CUDA runtime or torch's cuBLAS. Any other one is
# code that was never linked, because a source is missing from build.toml.
UNVERSIONED = re.compile(r"_?Py[A-Z_]\w*|aoti_\w+|torch_\w+|(__)?cuda[A-Z]\w*|cublas[A-Z]\w*")
TORCH_INTERNAL = ("c10::", "at::", "torch::", "caffe2::")
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
FATBIN_MAGIC = 0xBA55ED50
FATBIN_PTX, FATBIN_ELF = 1, 2
# FATBIN_FLAG_A and FATBIN_FLAG_F are 1 << 20 and 1 << 21 (sm_90a, sm_100f); found by comparing
# nvcc's output.
FATBIN_FLAG_A, FATBIN_FLAG_F = 1 << 20, 1 << 21


def problems(
    library: Path,
    stable_abi: str,
    torch_include: Path,
    machine: str,
    archs: tuple[str, ...] = (),
    cuda: str = "",
    stripped: bool = False,
    parts: Iterable[tuple[str, ...]] = (),
) -> list[str]:
    """Returns one sentence for every problem. `archs` are those of a CUDA library, () for a CPU
    library, and `cuda` is the version that it is for. A `stripped` library was fully checked when
    it was built; only its dynamic symbols are checked again. `parts` are the archs of its components
    that do not have all."""
    found = []
    if (built := machine_of(library)) != machine:
        return [f"is for {built}, but must be for {machine}"]
    if not stripped:
        if ".symtab" not in _run("readelf", "--wide", "--sections", library):
            return ["it is stripped, but the Python API can only be checked before that"]
        from kernel_abi_check import ObjectFile

        file = ObjectFile(library)
        violations = file.check_python_abi(PYTHON_ABI)
        found += [f"Python limited API {PYTHON_ABI}: {v!r}" for v in violations]
        found += [f"{MANYLINUX}: {v!r}" for v in file.check_manylinux(MANYLINUX)]
    found += _imports(library, newer_shims(torch_include, stable_abi), stable_abi)
    exports = [line.split()[-1] for line in _nm("--defined-only", library)]
    found += [f"exports {s}, but only PyInit_* may be" for s in exports if s[:7] != "PyInit_"]
    if not exports:
        found.append("exports no PyInit_*: REGISTER_EXTENSION is missing")
    dynamic = _run("readelf", "--wide", "--dynamic", library)
    found += [f"has {tag}" for tag in re.findall(r"\((RPATH|RUNPATH)\)", dynamic)]
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    allowed = re.compile(rf"(lib({'|'.join(LIBRARIES)})|ld-linux[-\w]*)\.so[.\d]*")
    cuda_libraries = (
        {"libtorch_cuda.so", f"libcudart.so.{cuda.partition('.')[0]}"} if cuda else set()
    )
    for name in needed:
        if name not in cuda_libraries and not allowed.fullmatch(name):
            runtime = f"CUDA {cuda}'s runtime, " if cuda else ""
            found.append(f"needs {name}, which is not torch, {runtime}libc or libstdc++")
    if archs and (held := cuda_archs(library)) != set(archs):
        found.append(f"holds code for {sorted(held)}, but must for {sorted(archs)}")
    elif archs:
        # common/cuda/code.cuh reads the archs of one source file; build.toml names those of the others.
        allowed = [held, *map(set, parts)]
        for part in fat_binaries(library):
            if part and part not in allowed:
                found.append(
                    f"has a source file with code for {sorted(part)}, but must for {sorted(archs)}"
                )
    return found


def machine_of(library: Path) -> str:
    """Returns the machine that the library's code is for, or its number in ELF."""
    number = struct.unpack("<H", library.read_bytes()[18:20])[0]
    return ELF_MACHINES.get(number, f"ELF machine {number}")


def newer_shims(torch_include: Path, floor: str) -> set[str]:
    """Returns the functions of torch's stable C shim that versions before `floor` + 1 lack."""
    floor_version = tuple(map(int, floor.split(".")))
    newer, version = set(), (0, 0)
    for header in ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h"):
        for line in (torch_include / header).read_text().splitlines():
            if match := re.match(r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)", line):
                version = (int(match[1]), int(match[2]))
            elif line.startswith("#endif // TORCH_FEATURE_VERSION"):
                version = (0, 0)
            elif version > floor_version:
                newer |= set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", line))
    return newer


def cuda_archs(library: Path) -> set[str]:
    """Returns the archs in the library's fat binaries: '9.0a' for machine code, '10.0+PTX' with PTX
    too."""
    return set().union(*fat_binaries(library))


def fat_binaries(library: Path) -> list[set[str]]:
    """Returns the archs of each fat binary in the library; there is one for each CUDA source file."""
    sections = _run("readelf", "--wide", "--section-headers", library)
    match = re.search(r"\.nv_fatbin\s+\w+\s+\w+\s+(\w+)\s+(\w+)", sections)
    if match is None:
        return []
    start, size = int(match[1], 16), int(match[2], 16)
    data = library.read_bytes()[start : start + size]
    found, at = [], 0
    while at + 16 <= len(data):
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # padding between the fat binaries of two translation units
            continue
        code, ptx = set(), set()
        entry, end = at + header, at + header + length
        while entry < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
            arch = _arch(data, entry)
            {FATBIN_PTX: ptx, FATBIN_ELF: code}.get(kind, set()).add(arch)
            entry += header + length
        found.append({f"{arch}+PTX" for arch in ptx} | (code - ptx))
        at = end
    return found


def _arch(data: bytes, entry: int) -> str:
    number = struct.unpack_from("<I", data, entry + 28)[0]
    flags = struct.unpack_from("<Q", data, entry + 40)[0]
    suffix = "a" if flags & FATBIN_FLAG_A else "f" if flags & FATBIN_FLAG_F else ""
    return f"{number // 10}.{number % 10}{suffix}"


def _imports(library: Path, newer: set[str], stable_abi: str) -> list[str]:
    found = []
    for line in _nm("--undefined-only", library):
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        plain = _run("c++filt", name).strip()
        if match := re.fullmatch(r"@?([A-Z]+)_([\d.]+)", version):
            limit = SYMBOL_LIMITS.get(match[1])
            if limit and tuple(map(int, match[2].split("."))) > limit:
                found.append(f"{MANYLINUX}: imports {plain} at {match[1]}_{match[2]}")
        elif plain.startswith(TORCH_INTERNAL):
            found.append(f"torch stable ABI: imports {plain}")
        elif name in newer:
            found.append(f"torch stable ABI {stable_abi}: {name} is newer")
        elif kind == "U" and not UNVERSIONED.fullmatch(name):
            found.append(f"imports {plain}, which nothing provides: is its source in build.toml?")
    return found


def _nm(which: str, library: Path) -> list[str]:
    return _run("nm", "--dynamic", which, library).splitlines()


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--stable-abi", required=True)
    parser.add_argument("--torch-include", type=Path, required=True)
    parser.add_argument("--archs", default="")
    parser.add_argument("--cuda", default="")
    parser.add_argument("--kernel", type=Path, required=True)
    args = parser.parse_args()
    archs = tuple(filter(None, args.archs.split(",")))
    found = problems(
        args.library, args.stable_abi, args.torch_include, args.machine, archs, args.cuda,
        parts=read_kernel(args.kernel).parts(archs),
    )  # fmt: skip
    for sentence in found:
        print(f"error: {args.library.name} {sentence}")
    raise SystemExit(len(found) > 0)


if __name__ == "__main__":
    main()
