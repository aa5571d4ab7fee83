"""Builds a kernel project's CUDA backend for the CPU, where the emulator (README.md) runs it.

    PYTHONPATH=scripts python tests/emulator/emulate.py KERNEL_DIR OUT [--sanitize] [--turing]

makes OUT/build/<variant>, which `kernels.get_local_kernel(OUT, backend="cpu")` loads: the sources of
build.toml's cuda components as they are, by g++, with the headers of include/ before the kernels'.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

from tooling.builder import BUILDER, BuildError, Kernel, read_kernel, variant

HERE = Path(__file__).resolve().parent
SUPPORTED = (platform.system(), platform.machine()) == ("Linux", "x86_64")

TORCH = Path(torch.__file__).parent
MACHINE = [HERE / "machine.cpp", HERE / "async.cpp"]
INCLUDE = [f"-I{HERE / 'include'}", f"-I{BUILDER.parent}"]
INCLUDE += ["-isystem", str(TORCH / "include")]
# -fno-strict-aliasing: CUDA code reads vectors through reinterpret_cast, which nvcc allows.
# -fno-extern-tls-init: `extern __shared__` needs no constructor.
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
FLAGS += ["-fno-extern-tls-init", "-DCUDA_KERNEL", "-DUSE_CUDA"]
SANITIZE = ["-fsanitize=address", "-fno-omit-frame-pointer"]
TURING = ["-DEMULATES_TURING"]


class Emulated(Kernel):
    """A variant whose ops have a namespace of their own, so that it loads beside the CPU's binary."""

    def id(self, backend: str) -> str:
        return f"_{self.python_name}_emulated_{self.content_hash()}"


class EmulatedTuring(Emulated):
    """The same, with the code for Turing."""

    def id(self, backend: str) -> str:
        return f"{super().id(backend)}_turing"


def build(project: Path, out: Path, sanitize: bool = False, turing: bool = False) -> Path:
    """Returns `out` with the emulated variant of the kernel project, compiled for Turing or for all
    others; does nothing if it is up to date."""
    _check_machine()
    read = read_kernel(project)
    read.check_backend("cuda")
    kind = EmulatedTuring if turing else Emulated
    kernel = kind(**{f.name: getattr(read, f.name) for f in dataclasses.fields(read)})
    out.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *SANITIZE * sanitize, *TURING * turing]
    stamp = _stamp(kernel, flags)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_built(out, stamp):
            with tempfile.TemporaryDirectory() as objects:
                library = _compile(kernel, flags, Path(objects))
                variant.assemble(kernel, "cpu", kernel.variant("cpu"), out / "build", library)
            (out / "stamp").write_text(stamp)
    return out


def build_program(source: Path, program: Path) -> Path:
    """Builds a program of one source, without torch."""
    _check_machine()
    sources = ["-x", "c++", str(source), *map(str, MACHINE)]
    _run([_compiler(), *FLAGS, *INCLUDE[:2], *sources, "-o", str(program)])
    return program


def _check_machine() -> None:
    if not SUPPORTED:
        raise BuildError("the emulator switches stacks as Linux x86_64 does, and runs there only")


def _is_built(out: Path, stamp: str) -> bool:
    return (out / "stamp").is_file() and (out / "stamp").read_text() == stamp


def _stamp(kernel: Kernel, flags: list[str]) -> str:
    """Returns a hash of everything that decides the binary: kernel, emulator, compiler, torch's
    headers."""
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(compiler)
    digest.update("\n".join([kernel.id("cpu"), torch.__version__, str(TORCH), *flags]).encode())
    for file in sorted(HERE.rglob("*.[chp]*")):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _compile(kernel: Kernel, flags: list[str], objects: Path) -> Path:
    major, minor = map(int, kernel.stable_abi["cuda"].split("."))
    flags = [*flags, f"-DTORCH_EXTENSION_NAME={kernel.id('cpu')}"]
    flags += [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}"]
    sources = [*MACHINE, HERE / "torch_shims.cpp"]
    include = list(INCLUDE)
    for component in kernel.components_for("cuda"):
        sources += [kernel.root / source for source in component.sources]
        include += [f"-I{kernel.root / folder}" for folder in component.include]

    def compiled(source: Path) -> Path:
        target = objects / f"{source.parent.name}_{source.name}.o"
        command = [_compiler(), *flags, *include, "-x", "c++", "-c", source, "-o", target]
        _run([str(word) for word in command])
        return target

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = list(pool.map(compiled, sources))
    library = objects / "library.so"
    # -Bsymbolic: calls reach torch_shims.cpp, not torch's functions of the same names.
    link = [_compiler(), *flags, "-shared", "-Wl,-Bsymbolic", *map(str, parts)]
    _run([*link, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer")
    parser.add_argument("--turing", action="store_true", help="for arch=75 shared=64")
    args = parser.parse_args()
    try:
        print(build(args.kernel, args.out.resolve(), args.sanitize, args.turing))
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
