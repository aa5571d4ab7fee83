"""The driver of the fuzzer: starts processes, watches how they end, and summarises findings."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds for one call


@dataclass
class Options:
    calls: int
    seed: int
    kinds: list[str]  # "entries", "raw"
    kernels: list[str]
    folder: Path  # the folder of the built kernels
    chosen: bool = False  # whether only some kernels were chosen
    asan: bool = False
    only: int | None = None
    plant: str = ""  # a fault for the test of the fuzzer: Python that the processes run first
    patience: float = PATIENCE


@dataclass
class Report:
    calls: int = 0
    accepted: int = 0
    refused: int = 0
    findings: list[dict] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)


def run(options: Options) -> Report:
    """Runs all calls in processes of child.py, which print one JSON line per finding."""
    report = Report()
    at = 0 if options.only is None else options.only
    job = {
        "begin": at,
        "end": options.calls if options.only is None else at + 1,
        "seed": options.seed,
    }
    job |= {"kernels": options.kernels, "kinds": options.kinds, "folder": str(options.folder)}
    job |= {"asan": options.asan, "plant": options.plant, "patience": options.patience}
    command = [sys.executable, str(ROOT / "scripts"), "fuzzing.child", json.dumps(job)]
    env = environment(options.asan)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line that a crash cut off
                take(report, json.loads(line))
    if process.returncode:
        problem = f"the fuzzer itself ends with {process.returncode} (see above)"
        report.findings.append({"index": at, "title": "the fuzzer", "problem": problem})
    return report


def take(report: Report, said: dict) -> None:
    if "problem" in said:
        report.findings.append(said)
    elif "counts" in said:
        calls, accepted, refused = said["counts"]
        report.calls, report.accepted = report.calls + calls, report.accepted + accepted
        report.refused += refused
    elif "reached" in said:
        report.reached.add(said["reached"])
    else:
        report.ops.update(said["ops"])


def environment(asan: bool) -> dict[str, str]:
    bounds = str(ROOT / "tests/support")  # numerics.py: how far a result may be from the reference
    env = {**os.environ, "PYTHONPATH": bounds, "OMP_NUM_THREADS": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if asan:
        find = lambda name: subprocess.check_output(
            ["g++", f"-print-file-name={name}"], text=True
        ).strip()
        env["LD_PRELOAD"] = f"{find('libasan.so')} {find('libstdc++.so.6')}"
        env["ASAN_OPTIONS"] = (
            "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=6000:handle_segv=1"
        )
    return env


def reproducer(options: Options, index: int) -> str:
    words = ["scripts/fuzz", "--seed", str(options.seed), "--only", str(index)]
    words += [f"--{kind}" for kind in options.kinds] if len(options.kinds) == 1 else []
    words += ["--asan"] if options.asan else []
    words += ["--kernel", *options.kernels] if options.chosen else []
    return " ".join(words)


def summary(options: Options, report: Report, seconds: float) -> str:
    lines = [
        f"{report.calls} calls in {seconds:.0f} s: {report.accepted} accepted, {report.refused} refused, "
        f"{len(report.findings)} findings"
    ]
    groups: dict[str, list[dict]] = collections.defaultdict(list)
    for finding in report.findings:
        groups[finding["problem"]].append(finding)
    for name, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(group):6d}  {name}")
        lines.append(f"        {group[0]['title']}: {reproducer(options, group[0]['index'])}")
    missing = sorted(op for op in report.ops if f"ops.{op}" not in report.reached)
    if missing and "raw" in options.kinds and options.only is None:
        lines.append(f"ops that no call reached: {', '.join(missing)}")
    return "\n".join(lines)
