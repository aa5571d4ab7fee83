"""Writes the wheels that bring CUDA kernels: flashcell-cu13 for every CUDA 13, flashcell-cu12 for 12.

A wheel holds the variants for the oldest CUDA of its major version that there are variants for: they run
with every later one, and two sets would make a wheel too large. The Hub has all of them.
Such a wheel is a package of files, flashcell_cu13/<kernel>/<variant>/, without code of its own.
flashcell finds them by the package's name and verifies them against its own lock, which pins them: so
a wheel of CUDA kernels needs the flashcell of its own version.
"""

from __future__ import annotations

import re
from pathlib import Path

from tooling.builder import Kernel
from tooling.finished import UnfitVariant, Variant

from . import archive, contents

INIT = '''"""CUDA {major} kernels of flashcell {version}, which finds and verifies them: nothing to import."""

__version__ = "{version}"
'''
METADATA = """Metadata-Version: 2.4
Name: flashcell-cu{major}
Version: {version}
Summary: CUDA {major} kernels of flashcell: recurrent networks on NVIDIA GPUs.
License-Expression: Apache-2.0
License-File: LICENSE
{urls}{classifiers}Requires-Python: >=3.10
Requires-Dist: flashcell=={version}
Description-Content-Type: text/markdown

# flashcell-cu{major}

The CUDA {major} kernels of [flashcell](https://huggingface.co/flashcell), compiled: {names}. Install it beside a torch
for CUDA {cuda} or a later {major}.x: `pip install "flashcell[cu{major}]"`. flashcell verifies every file before it runs one, and
`flashcell.kernel_info("fused-rnn", "cuda")` says whether it does.

Machine code for compute capabilities {archs}.
"""


def version_key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def write(
    out: Path,
    version: str,
    found: dict[str, tuple[Kernel, list[Variant]]],
    machine: str,
    needed: bool,
) -> list[str]:
    """Writes a wheel for each CUDA among the variants for a machine, and returns their names.

    One that some kernel has no variant for is an error if wheels are `needed`, else left out."""
    project, names = contents.project(), []
    variants = [v for _, own in found.values() for v in own if v.machine == machine]
    oldest: dict[str, str] = {}
    for cuda in sorted({variant.cuda for variant in variants if variant.cuda}, key=version_key):
        oldest.setdefault(cuda.split(".")[0], cuda)
    for major, cuda in oldest.items():
        package, tag = f"flashcell_cu{major}", f"cu{cuda.replace('.', '')}"
        try:
            files = contents.kernels_of(found, tag, machine, package)
        except UnfitVariant as error:
            if needed:
                raise
            print(f"left out: flashcell-cu{major}: {error}", flush=True)
            continue
        archs = {arch for v in variants if v.cuda == cuda for arch in v.archs}
        values = {
            "major": major,
            "cuda": cuda,
            "version": version,
            "names": ", ".join(found),
            "archs": ", ".join(sorted(archs, key=lambda arch: float(re.match(r"[\d.]+", arch)[0]))),
            "urls": "".join(f"Project-URL: {n}, {u}\n" for n, u in project["urls"].items()),
            "classifiers": "".join(f"Classifier: {c}\n" for c in project["classifiers"]),
        }
        info = f"{package}-{version}.dist-info"
        files[f"{package}/__init__.py"] = INIT.format_map(values).encode()
        files[f"{info}/METADATA"] = METADATA.format_map(values).encode()
        files[f"{info}/licenses/LICENSE"] = (contents.ROOT / "LICENSE").read_bytes()
        names.append(archive.write_wheel(out, files, contents.wheel_tag(machine)))
    return names
