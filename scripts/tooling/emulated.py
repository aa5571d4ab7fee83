"""Tests the CPU kernels for another machine, which are compiled here, under qemu's user emulation.

    scripts/test --machine aarch64              the fast tests of the ops, at each instruction set
    scripts/test --machine aarch64 -- -k lstm   arguments after -- go to pytest

Makes a folder of the machine's programs in the state folder: Debian's Python, fetched and unpacked by
apt-get and dpkg-deb, which need no root for that, and wheels that pip chooses for the machine. 1.3 GB.
Emulation says nothing of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tooling import environment, processes
from tooling.builder import BuildError, toolkits

ROOT = environment.ROOT
MACHINES = ("aarch64",)
RELEASE, ARCHITECTURE = "bookworm", "arm64"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PYTHON, PACKAGES = "3.11", ["python3.11", "libstdc++6"]
PROGRAMS = {  # program -> the package of Debian and Ubuntu that has it
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
}
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# The last torch whose wheel for aarch64 has no CUDA (146 MB), without what it requires on x86-64: pip
# reads conditions for the machine that it runs on.
TORCH = "2.10.0"
TORCH_REQUIRES = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"]
WHEELS = ["huggingface_hub", "kernels", "numpy", "pytest", "pytest-xdist", "transformers"]
# Instruction set of the kernels -> a CPU of qemu that chooses it. torch itself needs armv8.2-a.
CPUS = {"baseline": "neoverse-n1", "neon_bf16": "max,pauth-impdef=on,sve=off"}
# Left out are tests of GPUs, tests that need a compiler on the emulated machine (inductor's do),
# torch's checks of the Python side, which take ten seconds a test there, and a test that counts
# page faults, because qemu causes some itself.
LEFT_OUT = ("*cuda.py", "*emulated.py", "test_add_a_cell.py")
LEFT_OUT_TESTS = ("opcheck", "by_inductor", "scratch_stays")
KERNELS = {"": "fused-rnn", "DIAGONAL_": "diagonal-rnn", "TFLA_": "tfla"}
BYTES = 3 * 2**30


def run(args: argparse.Namespace) -> None:
    """Builds the kernels, makes the folder and runs the tests; exits with the number of failures."""
    check_programs()
    home = environment.state_folder(args.home)
    build = ["scripts/build_kernels", "--backend", "cpu", "--machine", args.machine, "--home", home]
    if subprocess.run([sys.executable, *map(str, build)], cwd=ROOT).returncode:
        environment.fail("a kernel could not be built (see above)")
    python = prepare(home / args.machine)
    failed = [level for level in CPUS if not passes(level, python, home, args)]
    if failed:
        environment.fail(f"{args.machine}: FAILED at {', '.join(failed)}")
    print(f"scripts/test: {args.machine} passed under qemu: {', '.join(CPUS)}")


def passes(level: str, python: Path, home: Path, args: argparse.Namespace) -> bool:
    """Runs the ops' tests on the CPU that chooses `level`."""
    print(f"\n== {args.machine} {level}: qemu -cpu {CPUS[level]}", flush=True)
    built = {f"FLASHCELL_TEST_{k}KERNEL": ROOT / "kernel_builds" / n for k, n in KERNELS.items()}
    variables = {**built, "QEMU_CPU": CPUS[level]}
    variables["HF_HOME"] = home / "huggingface"
    command = [python, ROOT / "scripts", "pytest", "-n", args.jobs, "--dist", "worksteal"]
    command += ["-o", f"cache_dir={home / 'pytest'}", "-o", "console_output_style=classic"]
    command += ["-p", "tooling.test_report", "-rfE", *([] if args.all else ["-m", "not slow"])]
    command += [f"--ignore-glob=*/{name}" for name in LEFT_OUT]
    command += [
        "-k",
        " and ".join(f"not {name}" for name in LEFT_OUT_TESTS),
        "tests/ops",
        *args.pytest,
    ]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {key: str(value) for key, value in variables.items()},
        preexec_fn=processes.end_with(os.getpid()),
    )
    return done.returncode == 0


def check_programs() -> None:
    missing = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    missing += ["debian-archive-keyring"] * (not KEYRING.exists())
    if missing:
        environment.fail(
            f"the tests under emulation need what is not on this machine: "
            f"apt-get install {' '.join(missing)}    (Debian, Ubuntu)"
        )


def prepare(folder: Path) -> Path:
    """Makes the folder with the machine's Python, torch and this package, unless it is up to date;
    returns a command that runs that Python."""
    stamp, python, log = folder / "made.json", folder / "python", folder / "made.log"
    content = b"".join(f.read_bytes() for f in (environment.CONSTRAINTS, Path(__file__)))
    content += (ROOT / "pyproject.toml").read_bytes() + bytes(ROOT)
    wanted = {"key": hashlib.sha256(content).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    with processes.locked(folder / "lock"):
        if stamp.exists() and json.loads(stamp.read_text()) == wanted:
            return python
        environment.check_space(folder, BYTES)
        print(f"making {folder}: Python {PYTHON} and torch {TORCH} for its CPUs", flush=True)
        stamp.unlink(missing_ok=True)
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        for package in fetch_packages(folder / "apt", log):
            call(log, "dpkg-deb", "-x", package, root)
        python.write_text(
            "#!/bin/sh\n# sys.executable is this file, so that the tests can start processes.\n"
            f"export PYTHONHOME='{root}/usr'\n"
            f"exec qemu-aarch64 -0 \"$0\" -L '{root}' '{root}/usr/bin/python{PYTHON}' \"$@\"\n"
        )
        python.chmod(0o755)
        install_wheels(root / f"usr/local/lib/python{PYTHON}/dist-packages", folder)
        stamp.write_text(json.dumps(wanted))
    return python


def fetch_packages(apt: Path, log: Path) -> list[Path]:
    """Fetches Debian's packages and all that they need, apart from this machine's packages."""
    for folder in ("lists/partial", "cache/archives/partial", "etc/preferences.d"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")  # no package is installed
    try:
        mirror = toolkits.debian_mirror("the emulated Python", "run it on Debian")
    except BuildError as error:
        environment.fail(str(error))
    source = f"deb [arch={ARCHITECTURE} signed-by={KEYRING}] {mirror} {RELEASE} main\n"
    (apt / "sources.list").write_text(source)
    settings = {
        "APT::Architecture": ARCHITECTURE,
        "APT::Architectures": ARCHITECTURE,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": 1,
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Dir::Etc": apt / "etc",
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    call(log, "apt-get", *options, "update")
    shutil.rmtree(apt / "cache/archives")
    (apt / "cache/archives/partial").mkdir(parents=True)
    fetch = ["install", "--download-only", "--yes", "--no-install-recommends"]
    call(log, "apt-get", *options, *fetch, *PACKAGES)
    return sorted((apt / "cache/archives").glob("*.deb"))


def install_wheels(target: Path, folder: Path) -> None:
    """Installs the wheels for the machine, and this checkout, into Python's folder of packages."""
    pins = folder / "constraints.txt"
    lines = environment.CONSTRAINTS.read_text().splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if not line.startswith("torch==")))
    into = ["install", "--target", target]
    machine = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    machine += [word for name in PLATFORMS for word in ("--platform", name)]
    log = folder / "pip.log"
    environment.pip([*into, *machine, "--no-deps", f"torch=={TORCH}"], log)
    environment.pip([*into, *machine, "-c", pins, *TORCH_REQUIRES, *WHEELS], log)
    environment.pip([*into, "--no-deps", "--no-build-isolation", "-e", ROOT], log)


def call(log: Path, *command: str | Path) -> None:
    with open(log, "w") as output:
        done = subprocess.run(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT,
            preexec_fn=processes.end_with(os.getpid()),
        )  # fmt: skip
    if done.returncode:
        environment.fail(f"`{command[0]}` failed ({log}):\n{log.read_text().strip()}")
