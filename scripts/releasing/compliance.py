"""Lists the build variants that the `kernels` package asks for, and which of them are there.

`kernels` calls a kernel compliant on a system, say CUDA on x86_64-linux, if a variant is there for
every version of torch and of CUDA in its documentation's list of build variants. A variant on
torch's stable ABI counts for its own version of torch and all later ones; kernel-builder, too,
builds only one for each version of CUDA. Where that is missing, `kernels` loads the variant of an
earlier minor version of the same CUDA, if there is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from flashcell.hub.kernel_variants import STABLE_VARIANT
from flashcell.hub.lock_format import read_lock
from tooling.builder import Kernel
from tooling.finished import UnfitVariant, folders, read_variant

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib; pytest installs tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# torch -> what is asked for with it: up to 2.13 by lists of build variants in the documentation of
# `kernels`, 2.14 by kernel-builder's table of versions.
ASKED = {
    "2.10": "cpu metal cu126 cu128 cu130 rocm70 rocm71 xpu20253",
    "2.11": "cpu metal cu126 cu128 cu130 rocm71 rocm72 xpu20253",
    "2.12": "cpu metal cu126 cu130 cu132 rocm71 rocm72 xpu20253",
    "2.13": "cpu metal cu126 cu130 cu132 rocm71 rocm72 xpu20260",
    "2.14": "cpu metal cu126 cu130 cu132 rocm72 xpu20261",
}
SYSTEMS = {  # framework -> where it is asked for
    "cpu": ("x86_64-linux", "aarch64-linux", "aarch64-darwin"),
    "cuda": ("x86_64-linux", "aarch64-linux"),
    "metal": ("aarch64-darwin",),
    "rocm": ("x86_64-linux",),
    "xpu": ("x86_64-linux",),
}
HERE, PINNED, MISSING = "built", "published", "missing"
LEGEND = """built: here, of these sources; published: pinned by the lock; by cuXY: `kernels` loads that
one in its place, though the list has a variant of its own"""


def asked(least: str) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Returns (framework, system) -> {tag of a variant: the torch versions that ask for it}, for
    torch `least` and later."""
    wanted: dict[tuple[str, str], dict[str, list[str]]] = {}
    for torch, tags in ASKED.items():
        if _version(torch) < _version(least):
            continue
        for tag in tags.split():
            letters = re.match("[a-z]+", tag)[0]  # type: ignore[index]
            framework = {"cu": "cuda"}.get(letters, letters)
            for system in SYSTEMS[framework]:
                wanted.setdefault((framework, system), {}).setdefault(tag, []).append(torch)
    return wanted


def standing(name: str, there: dict[str, str]) -> str:
    """Returns how the variant `name` is there, or which one `kernels` takes in its place; `there`:
    variant -> HERE or PINNED."""
    if name in there:
        return there[name]
    match = STABLE_VARIANT.fullmatch(name)
    if match is None or match[4] is None:
        return MISSING
    others = [m for m in map(STABLE_VARIANT.fullmatch, there) if m and m[4] == match[4]]
    same = [m for m in others if m.group(1, 2, 6, 7) == match.group(1, 2, 6, 7)]
    minors = [int(m[5]) for m in same if int(m[5]) < int(match[5])]
    return f"by cu{match[4]}{max(minors)}" if minors else MISSING


def report(kernels: list[Kernel], lock: Path, torch_include: Path) -> str:
    """Returns the report: for each system the variants that are asked for, and how each kernel has
    them."""
    least = promised_torch()
    wanted = asked(least)
    there = {kernel.name: variants_of(kernel, lock, torch_include) for kernel in kernels}
    lines = [f"variants that `kernels` asks for with torch {least} to {max(ASKED, key=_version)}:"]
    for (framework, system), tags in wanted.items():
        rows = []
        for tag, torches in sorted(tags.items()):
            names = [name_of(kernel, framework, tag, system) for kernel in kernels]
            cells = [standing(n, there[k.name]) for n, k in zip(names, kernels, strict=True)]
            rows.append((names[0], _range(torches), *cells))
        found = [cell for row in rows for cell in row[2:]]
        lines += ["", f"{framework} {system}: {verdict(found)}"]
        lines += _table([("variant", "torch", *there), *rows])
    return "\n".join([*lines, "", LEGEND])


def name_of(kernel: Kernel, framework: str, tag: str, system: str) -> str:
    """Returns the name that this variant of the kernel has, or would have."""
    abi = kernel.stable_abi.get(framework) or max(kernel.stable_abi.values(), key=_version)
    return f"torch-stable-abi{abi.replace('.', '')}-{tag}-{system}"


def verdict(found: list[str]) -> str:
    if all(cell in (HERE, PINNED) for cell in found):
        return "compliant"
    if MISSING not in found:
        return "loads everywhere, but the list is not complete"
    return "nothing is there" if set(found) == {MISSING} else "not compliant"


def variants_of(kernel: Kernel, lock: Path, torch_include: Path) -> dict[str, str]:
    """Returns the variants of a kernel that the lock pins for its version, and those built here."""
    pinned = read_lock(lock)["kernels"].get(kernel.name, {}) if lock.exists() else {}
    found = {}
    if pinned.get("version") == kernel.version:
        found = dict.fromkeys(pinned["variants"], PINNED)
    for folder in folders(kernel.root / "build"):
        try:
            read_variant(kernel, folder, torch_include)
        except (UnfitVariant, KeyError, json.JSONDecodeError):  # of other sources, or damaged
            continue
        found[folder.name] = HERE
    return found


def promised_torch() -> str:
    """Returns the oldest torch that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (least,) = (d.partition(">=")[2] for d in project["dependencies"] if d.startswith("torch>="))
    return least


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()


def _range(torches: list[str]) -> str:
    return torches[0] if len(torches) == 1 else f"{torches[0]} to {torches[-1]}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
