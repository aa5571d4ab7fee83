"""Writes build.toml as a CMake file, which CMakeLists.txt includes.

configure.py KERNEL_DIR --backend cpu|cuda --machine x86_64 [--archs 9.0a,10.0+PTX --cuda 13.0] OUTPUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

from archs import default_archs, gencode, parse_archs
from build_toml import BACKENDS, MACHINES, BuildError, Component, Kernel, read_kernel


def cmake_text(
    kernel: Kernel, backend: str, archs: tuple[str, ...], cuda: str, machine: str
) -> str:
    """Returns the CMake text: the ids, and one kernel_component() call for each component."""
    quote = lambda words: " ".join(f'"{w}"' for w in words)
    lines = [
        f"set(KERNEL_ID {kernel.id(backend)})",
        f"set(KERNEL_VARIANT {kernel.variant(backend, cuda, machine)})",
        f"set(KERNEL_ARCHS {quote([','.join(archs)])})",
        f"set(KERNEL_STABLE_ABI {kernel.stable_abi[backend]})",
        f"set(KERNEL_FILES {quote(kernel.files())})",
    ]
    for component in kernel.components_for(backend, machine):
        own = component.archs_for(archs)
        lines.append(
            f"kernel_component({component.name}"
            f"\n  SOURCES {quote(kernel.root / s for s in component.sources)}"
            f"\n  INCLUDE {quote(kernel.root / i for i in component.include)}"
            f"\n  CXX_FLAGS {quote(component.cxx_flags)}"
            f"\n  CUDA_FLAGS {quote([*cuda_flags(component, cuda), *gencode(own)])})"
        )
    return "\n".join(lines) + "\n"


def cuda_flags(component: Component, cuda: str) -> list[str]:
    """Returns the component's flags for nvcc, in the words of CUDA `cuda`."""
    if cuda and int(cuda.split(".")[0]) >= 13:
        return list(component.cuda_flags)
    # nvcc knows --compress-mode since 12.8, and drivers of all CUDA 12 unpack what this makes.
    words = {"--compress-mode=size": "-Xfatbin=-compress-all"}
    return [words.get(flag, flag) for flag in component.cuda_flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--machine", choices=MACHINES, required=True)
    parser.add_argument("--archs", default="")
    parser.add_argument(
        "--cuda", default="", help="the toolkit's version, 13.0; for the cuda backend"
    )
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    try:
        kernel = read_kernel(args.kernel)
        kernel.check_backend(args.backend)
        archs = ()
        if args.backend == "cuda":
            archs = parse_archs(args.archs) if args.archs else default_archs(kernel, args.cuda)
        text = cmake_text(kernel, args.backend, archs, args.cuda, args.machine)
        args.output.write_text(text)
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
