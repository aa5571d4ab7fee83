"""Finds or makes the Python environment of a script, under the state folder. Stdlib only.

The state folder (--home, $FLASHCELL_HOME or .flashcell/ in the checkout) holds the environment, the
builds, the local Hub and the caches; nothing is written outside it, and removing it undoes all.

In an installed package there is no checkout: the present Python is used, the kernels are those that
the package finds, and the state folder is .flashcell/ in the current folder.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tooling.processes import end_with

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
CONSTRAINTS = ROOT / "constraints.txt"
# What build_kernels needs besides the package itself; all of it comes as wheels.
BUILD_TOOLS = ["cmake", "ninja", "kernel-abi-check", "jinja2"]
NEEDED_BYTES = 3 * 2**30
PASSED_ON = "FLASHCELL_ENTERED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--home", type=Path, help="state folder; default $FLASHCELL_HOME or .flashcell/"
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="use the present Python; else a checkout makes an environment in --home (gigabytes)",
    )


def state_folder(home: Path | None) -> Path:
    """Chooses the state folder, exports it to child processes, and puts all caches inside it."""
    default = (ROOT if IS_CHECKOUT else Path()) / ".flashcell"
    home = (home or Path(os.environ.get("FLASHCELL_HOME") or default)).resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write the state folder {home}: {error.strerror}; choose one with --home")
    os.environ["FLASHCELL_HOME"] = str(home)
    return home


def enter(args: argparse.Namespace, extras: list[str], modules: list[str]) -> Path:
    """Returns the state folder in a Python that has `modules`; makes one and restarts if need be."""
    home = state_folder(args.home)
    if args.here or not IS_CHECKOUT or os.environ.pop(PASSED_ON, None):
        missing = [name for name in modules if find_spec(name) is None]
        if missing and not IS_CHECKOUT:
            fail(
                f"{sys.executable} has no {', '.join(missing)}: "
                f"pip install 'flashcell[{','.join(extras)}]'"
            )
        if missing:
            wanted = f".[{','.join(extras)}]" if extras else "."
            fail(
                f"{sys.executable} has no {', '.join(missing)}. Leave out --here, or run\n"
                f"  {sys.executable} -m pip install -c constraints.txt -e '{wanted}' "
                f"{' '.join(BUILD_TOOLS)}"
            )
        # cmake, ninja and the checkers stand beside the interpreter, activated or not
        beside = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
        return home
    python = prepare(home, extras)
    os.environ[PASSED_ON] = "1"
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.orig_argv[1:]])


def prepare(home: Path, extras: list[str]) -> Path:
    """Makes the environment with the package, `extras` and pinned build tools; returns its
    Python."""
    venv, stamp = home / "venv", home / "venv" / "flashcell.json"
    python = venv / "bin" / "python"
    with _locked(home):
        made = _read(stamp)
        wanted = {"key": _key(), "extras": sorted({*extras, *made.get("extras", [])})}
        if made == wanted and python.exists():
            return python
        _check_machine(home)
        started = time.monotonic()
        if made.get("key", "")[:12] != wanted["key"][:12] or not python.exists():
            print(f"making a Python environment in {venv}", flush=True)
            _make_venv(venv)
        stamp.unlink(missing_ok=True)
        print(f"installing torch {_pinned('torch')} (CPU), transformers and the rest", flush=True)
        log = home / "pip.log"
        _install_torch(python, log)
        package = f"{ROOT}[{','.join(wanted['extras'])}]" if wanted["extras"] else str(ROOT)
        packages = ["install", "-c", str(CONSTRAINTS), "-e", package, *BUILD_TOOLS]
        _pip(python, packages, log, required=True)
        stamp.write_text(json.dumps(wanted))
        print(f"environment ready after {time.monotonic() - started:.0f} s", flush=True)
    return python


def prepare_for(home: Path, name: str, packages: list[str], gigabytes: int) -> Path:
    """Makes or updates the environment `name` of the state folder, with the newest `packages` that
    pip finds and this package without its dependencies; returns its Python."""
    venv = home / name
    python = venv / "bin" / "python"
    with _locked(home):
        if not python.exists():
            _check_machine(home, gigabytes * 2**30)
            _make_venv(venv)
        log = home / f"pip-{name}.log"
        patience = "--timeout=60", "--retries=2"  # an index that does not answer is an error
        _pip(python, ["install", *patience, "--upgrade", *packages], log, required=True)
        _pip(python, ["install", "--no-deps", "-e", str(ROOT)], log, required=True)
    return python


def make_user(venv: Path, log: Path, packages: list[str]) -> Path:
    """Makes an environment as a user has it, with the pinned torch and `packages`, among which may be
    options of pip; returns its Python."""
    _make_venv(venv)
    python = venv / "bin" / "python"
    _install_torch(python, log)
    _pip(python, ["install", "-c", str(CONSTRAINTS), *packages], log, required=True)
    return python


def make_tools(home: Path, name: str, tools: list[str]) -> Path:
    """Makes the environment `name` of the state folder with `tools`, unless it is there; returns the
    folder of its programs."""
    venv, stamp = home / name, home / name / "tools.json"
    wanted = {"tools": [f"{tool}=={_pinned(tool)}" for tool in tools]}
    with _locked(home):
        if _read(stamp) != wanted:
            _make_venv(venv)
            log = home / f"pip-{name}.log"
            _pip(venv / "bin/python", ["install", *wanted["tools"]], log, required=True)
            stamp.write_text(json.dumps(wanted))
    return venv / "bin"


def check_torch(device: str) -> None:
    """Exits with a clear message if `device` is "cuda" and torch can use no GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            fail(
                f"--device is cuda, but torch {torch.__version__} of {sys.executable} can use no "
                "GPU: run this with --here and a Python whose torch can"
            )


def use_built_kernels(device: str, names: list[str] | None = None, build: bool = True) -> None:
    """Builds kernels (all, or `names`) and adds them to $LOCAL_KERNELS, unless named there already,
    or no checkout is there to build them.

    With `build` false another process has built them."""
    if "LOCAL_KERNELS" in os.environ or not IS_CHECKOUT:
        return
    if names is None:
        names = sorted(file.parent.name for file in (ROOT / "kernel_builds").glob("*/build.toml"))
    for name in names if build else ():
        command = [ROOT / "scripts/build_kernels", "--kernel", name, "--backend", device]
        if subprocess.run([sys.executable, *command]).returncode:
            fail(f"the kernel {name} could not be built (see above)")
    named = [f"flashcell/{name}={ROOT / 'kernel_builds' / name}" for name in names]
    os.environ["LOCAL_KERNELS"] = ":".join(named)


def find_compiler() -> str:
    """Returns the C++ compiler, or exits with a message that says how to get one."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        fail(
            f"no C++ compiler: {name} is not on PATH. The kernels are built from source; install "
            "it with\n  apt install g++    (Debian, Ubuntu)\n  dnf install gcc-c++    (Fedora)"
        )
    return name


def fail(message: str) -> None:
    raise SystemExit(f"{Path(sys.argv[0]).stem}: {message}")


def _key() -> str:
    """Returns what the environment depends on: Python, path, and requirements."""
    place = f"{sys.version_info[:2]} {sys.base_prefix} {ROOT}"
    content = (ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()
    return hashlib.sha256(place.encode()).hexdigest()[:12] + hashlib.sha256(content).hexdigest()


def _read(stamp: Path) -> dict:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}


def _pinned(package: str) -> str:
    for line in CONSTRAINTS.read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.partition("==")[2].strip()
    raise AssertionError(f"constraints.txt does not pin {package}")


def _install_torch(python: Path, log: Path) -> None:
    """Installs the pinned torch: its CPU build, if pip finds one."""
    version = _pinned("torch")
    torch = ["install", "-c", str(CONSTRAINTS), f"torch=={version}"]
    if not _pip(python, [*torch[:-1], f"{torch[-1]}+cpu"], log):
        print(
            f"no CPU build of torch {version} on pip's index: taking the default build, which "
            "may bring gigabytes of CUDA\n(to avoid that, set PIP_EXTRA_INDEX_URL to PyTorch's "
            "index of CPU builds)",
            flush=True,
        )
        _pip(python, torch, log, required=True)


def _check_machine(home: Path, needed: int = NEEDED_BYTES) -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        fail(
            f"this is {sys.platform} on {os.uname().machine}; the kernels are built for Linux on "
            "x86_64. Install the package with pip: there it runs its torch reference."
        )
    check_space(home, needed)


def check_space(home: Path, needed: int) -> None:
    """Exits with a clear message if less than `needed` bytes are free."""
    free = shutil.disk_usage(home).free
    if free < needed:
        fail(
            f"{home} has {free / 2**30:.1f} GiB free, the environment needs "
            f"{needed / 2**30:.0f} GiB; make room or choose another folder with --home"
        )


def _make_venv(venv: Path) -> None:
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        fail(
            f"{sys.executable} comes without venv; install it with\n"
            f"  apt install python3-venv python3-pip    (Debian, Ubuntu)"
        )
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        fail(f"`{' '.join(command)}` failed:\n{done.stdout.strip()}")


def pip(arguments: list, log: Path) -> None:
    """Runs the present Python's pip, or exits with what it said."""
    _pip(Path(sys.executable), [str(word) for word in arguments], log, required=True)


def _pip(python: Path, arguments: list[str], log: Path, required: bool = False) -> bool:
    """Runs pip into `log`; on a failure that counts, says what it said and what that means."""
    command = [str(python), "-m", "pip", *arguments, "--no-input", "--progress-bar", "off"]
    with open(log, "w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with(os.getpid())
        )
    if done.returncode == 0 or not required:
        return done.returncode == 0
    said = log.read_text().strip()
    reason = "see above"
    if "No space left" in said:
        reason = f"the disk is full: make room near {log.parent}, or choose another --home"
    elif any(
        word in said for word in ("Connection", "ProxyError", "Retrying", "Temporary failure")
    ):
        reason = "a package index could not be reached: check the network, or pip's own settings"
    elif "No matching distribution" in said:
        reason = f"an index lacks a package for Python {sys.version.split()[0]} on this machine"
    tail = "\n".join(f"  {line}" for line in said.splitlines()[-12:])
    fail(f"pip could not install the requirements ({log}):\n{tail}\n{reason}")


@contextlib.contextmanager
def _locked(home: Path):
    """Locks the environment, so that one process at a time makes it."""
    with open(home / "environment.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another command that makes the environment", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
