"""Describes the device, versions and commit of a result row, and appends rows to CSV files."""

import csv
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {p.parent.name: p.parent for p in ROOT.glob("kernel_builds/*/build.toml")}
PROJECT = KERNELS["fused-rnn"]
RESULTS = ROOT / "scripts" / "results"
Row = dict[str, Any]


def output_of(*command: str) -> str | None:
    """Returns the output of a program, or None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def zen(family: int, model: int) -> str:
    """Returns the core of an AMD processor from its numbers: 'Zen 3' for family 25, model 1."""
    if family == 25:
        return "Zen 4" if model >> 4 in (1, 6, 7, 10) else "Zen 3"
    return {23: "Zen" if model < 48 else "Zen 2", 26: "Zen 5"}.get(family, f"family {family}")


def cpu_name(cpuinfo: str, requested: str | None = None) -> str:
    """Returns the CPU's name from /proc/cpuinfo with the kernels' instruction set: 'AMD EPYC (Zen
    3, AVX2)'.

    As select_level of kernel_builds/common/torch/isa.h; `requested` is FLASHCELL_CPU_ISA.
    """
    found = dict(re.findall(r"^(\S[^\t:]*?)\s*:\s*(.*)$", cpuinfo, re.MULTILINE))
    flags = set(found["flags"].split())
    isa = "AVX2" if {"avx2", "fma", "bmi1", "bmi2", "f16c"} <= flags else "x86-64"
    if isa == "AVX2" and {f"avx512{part}" for part in ("f", "cd", "bw", "dq", "vl")} <= flags:
        isa = "AVX512-BF16" if "avx512_bf16" in flags else "AVX512"
    isa = {"baseline": "x86-64", "avx2": "AVX2", "avx512": "AVX512"}.get(requested or "", isa)
    amd = found.get("vendor_id") == "AuthenticAMD"
    core = [zen(int(found["cpu family"]), int(found["model"]))] if amd else []
    return f"{found['model name']} ({', '.join([*core, isa])})"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "model name" in (text := cpuinfo.read_text()):
        return cpu_name(text, os.environ.get("FLASHCELL_CPU_ISA"))
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Returns HEAD, marked if the working tree differs from it; None outside git."""
    git = ("git", "-C", str(ROOT))
    head = output_of(*git, "rev-parse", "--short=10", "HEAD")
    benchmarks = [*(ROOT / "scripts").glob("bench*"), ROOT / "scripts/measurement"]
    dirty = output_of(
        *git, "status", "--porcelain", "--", *map(str, [*KERNELS.values(), *benchmarks])
    )
    return head and head + ("+dirty" if dirty else "")


def provenance(device: str, kernel: Any, named: str | None) -> dict[str, str]:
    stamp = {"device": device_name(device)}
    if device == "cuda":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        stamp["driver"] = (output_of(*query) or "unknown").partition("\n")[0]
        stamp["cudnn"] = str(torch.backends.cudnn.version())
    ops = kernel.dispatch.ops
    return stamp | {
        "torch": torch.__version__.split("+")[0],
        "kernel": "reference" if ops is None else ops.name,
        "commit": named or commit() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def path_of(row: Row, folder: Path, kind: str = "") -> Path:
    """Returns folder/<device>[-<kind>].csv."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{row['device']} {kind}".lower()).strip("-")
    return folder / f"{name}.csv"


def append(rows: list[Row], folder: Path, kind: str = "") -> Path:
    """Appends rows to the file of their device in its column order; creates it if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(rows[0], folder, kind)
    with path.open("a+", newline="") as file:
        file.seek(0)
        header = next(csv.reader(file), None)
        writer = csv.DictWriter(file, header or list(rows[0]), restval="", lineterminator="\n")
        if header is None:
            writer.writeheader()
        writer.writerows(rows)
    return path
