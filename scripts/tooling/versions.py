"""Runs tests with the oldest or the newest torch and transformers that pyproject.toml allows.

    scripts/test --versions oldest    the lower ends of the ranges
    scripts/test --versions newest    the newest releases that pip finds
    scripts/test --versions today     one of the two, by the day, with one test of each family

Each end has an environment of its own in the state folder, with torch's default build: about 7 GB,
with CUDA, which the tests do not need. The kernels are the usual environment's, as in a release.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

from tooling import environment

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib; pytest installs tomli
    import tomli as tomllib

ROOT = environment.ROOT
CHOICES = ("oldest", "newest", "today")
TOOLS = ["accelerate", "peft", "pytest", "pytest-xdist", *environment.BUILD_TOOLS]
# The tests that depend on the versions of torch and transformers; the kernels' results do not.
TESTS = ["tests/modeling", "tests/ops/test_forward_mode.py"]
TESTS += ["tests/ops/test_raw_ops.py", "tests/ops/fused_rnn/test_registration.py"]
TESTS += [f"tests/ops/{kernel}/test_validation.py" for kernel in ("diagonal_rnn", "tfla")]
# transformers 5.17 takes huggingface_hub below 2, which cannot publish the kernels that these fetch.
NEWEST_ONLY = ["tests/hub"]
KERNELS = {"": "fused-rnn", "DIAGONAL_": "diagonal-rnn", "TFLA_": "tfla"}
GIGABYTES = 10


def run(args: argparse.Namespace) -> None:
    """Makes the environment of one end and runs the tests there; exits with pytest's status."""
    end = args.versions
    if end == "today":
        end = CHOICES[time.gmtime().tm_yday % 2]
    home = environment.state_folder(args.home)
    build = [ROOT / "scripts/build_kernels", "--home", home, *["--here"] * args.here]
    if subprocess.run([sys.executable, *map(str, build)]).returncode:
        environment.fail("a kernel could not be built (see above)")
    print(f"making the environment of the {end} versions", flush=True)
    python = environment.prepare_for(home, end, packages(end), GIGABYTES)
    report = (
        "import torch, transformers as t; print(f'torch {torch.__version__}, {t.__version__=}')"
    )
    subprocess.run([python, "-c", report], check=True)
    beside = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    built = {
        f"FLASHCELL_TEST_{k}KERNEL": str(ROOT / "kernel_builds" / n) for k, n in KERNELS.items()
    }
    variables = {**os.environ, **built, "PATH": beside, "HF_HOME": str(home / "huggingface")}
    command = [python, ROOT / "scripts", "pytest", "-n", args.jobs, "--dist", "worksteal"]
    command += ["-m", "not slow", "-p", "tooling.test_report", "-rfE"]
    command += ["-o", "console_output_style=classic", "-o", f"cache_dir={home / 'pytest'}"]
    command += [*TESTS, *args.pytest]
    command += NEWEST_ONLY if end == "newest" else []
    command += ["--one-of-each"] if args.versions == "today" else []
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=variables)
    raise SystemExit(done.returncode)


def packages(end: str) -> list[str]:
    """Returns what pip installs: at the oldest end torch's and transformers' first release of the
    range, and of all others the newest that go with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for wanted in project["dependencies"]:
        name, least = re.match(r"([\w-]+)>=([\d.]+)", wanted).groups()  # type: ignore[union-attr]
        exact = end == "oldest" and name in ("torch", "transformers")
        found.append(f"{name}=={least}.*" if exact else wanted)
    return [*found, *TOOLS]
