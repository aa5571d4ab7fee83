"""Checks style, types and structure, then builds the kernels and runs the tests.

    scripts/test                 all tests but the slow ones: about 40 minutes on two cores
    scripts/test --ci            besides, whether the CUDA sources compile, and the tests of models with
                                 the oldest or the newest torch and transformers, by the day
    scripts/test --all           the tests marked slow too, and CUDA compiled as it ships
    scripts/test -- -k lstm -x   arguments after -- go to pytest

Makes its own environment (--here: uses the present one). Every step runs, whatever came before; the
exit status is 0 only if all of them passed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tooling import emulated, environment, processes, versions

ROOT = environment.ROOT
MODULES = ["flashcell", "jinja2", "kernel_abi_check", "kernels", "accelerate", "matplotlib", "peft"]
MODULES += ["pytest", "xdist", "ruff", "mypy", "codespell_lib", "fastapi", "openai"]
Step = tuple[str, list]


def parse_arguments() -> argparse.Namespace:
    summary, _, manual = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="test",
        description=summary,
        epilog=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--all", action="store_true", help="run the slow tests too, and compile CUDA as it ships")
    add("--ci", action="store_true", help="what CI runs on every change")
    add(
        "--lint", action="store_true", help="the checks that read files only; build and run nothing"
    )
    add(
        "--versions",
        choices=versions.CHOICES,
        help="test with other torch and transformers, and nothing else",
    )
    add(
        "--machine",
        choices=emulated.MACHINES,
        help="test the kernels for another machine under emulation, and nothing else",
    )
    # One more than the cores of a small machine: tests of servers and of other processes mostly wait.
    add("--jobs", type=int, default=3, help="pytest processes")
    add("pytest", nargs="*", help="arguments for pytest, after --")
    environment.add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if not args.lint:
        environment.find_compiler()
    started = time.monotonic()
    home = environment.enter(args, ["dev", "ray", "serve", "train"], MODULES)
    if args.versions:
        return versions.run(args)
    if args.machine:
        return emulated.run(args)
    os.environ["HF_HOME"] = str(home / "huggingface")
    os.environ["RUFF_CACHE_DIR"] = str(home / "ruff")
    steps = lint_steps() if args.lint else [*lint_steps(), *run_steps(args, home)]
    failed = [
        name
        for number, (name, command) in enumerate(steps, 1)
        if not passes(name, command, f"{number} of {len(steps)}")
    ]
    spent = f"{(time.monotonic() - started) / 60:.1f} minutes"
    if failed:
        raise SystemExit(f"scripts/test: FAILED after {spent}: {', '.join(failed)}")
    print(f"scripts/test: all {len(steps)} steps passed in {spent}")


def lint_steps() -> list[Step]:
    scripts = ROOT / "scripts"
    return [
        ("ruff check", tool("ruff", "check", ".")),
        ("ruff format", tool("ruff", "format", "--check", ".")),
        ("clang-format", ["clang-format", "--dry-run", "--Werror", *native_sources()]),
        ("codespell", ["codespell", *tracked()]),
        ("types", [sys.executable, scripts / "check_types"]),
        ("structure", [sys.executable, scripts / "check_repo", "--fast"]),
    ]


def run_steps(args: argparse.Namespace, home: Path) -> list[Step]:
    build = [sys.executable, ROOT / "scripts" / "build_kernels", "--here", "--home", home]
    steps: list[Step] = [("build", build)]
    cuda = sorted({f.parts[1] for f in map(Path, tracked()) if is_shipped_cuda(f)})
    if cuda and (args.ci or args.all):  # compiled, not run: the arch with most code is enough
        archs = "7.5;9.0a" if args.all else "9.0a"  # of others 7.5 differs most
        options = ["--backend", "cuda", "--archs", archs, "--home", home, "--kernel", *cuda]
        options += ["--out", home / "cuda"] if args.all else ["--check"]
        steps.append(("build cuda", [*build[:2], *options]))
        if args.all:  # by the oldest compiler that a release uses, for the arch with least code
            options = ["--backend", "cuda", "--cuda", "12.6", "--archs", "8.0", "--home", home]
            options += ["--out", home / "cuda12", "--kernel", *cuda]
            steps.append(("build cuda 12", [*build[:2], *options]))
    steps.append(("repository", [sys.executable, ROOT / "scripts" / "check_repo"]))
    if args.ci:
        versions = [sys.executable, ROOT / "scripts", "tooling.test", "--versions", "today"]
        steps.append(("versions", [*versions, "--here", "--home", home, "--jobs", args.jobs]))
    return [*steps, tests(args, home)]


def tests(args: argparse.Namespace, home: Path) -> Step:
    command = [sys.executable, ROOT / "scripts", "pytest"]  # where pytest finds the plugin
    command += ["-n", str(args.jobs), "--dist", "worksteal"]
    chosen = [*args.pytest, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    if not any(word.startswith("--durations") for word in chosen):
        command += ["--durations=10"]
    command += ["-o", f"cache_dir={home / 'pytest'}", "-o", "console_output_style=classic"]
    command += ["-p", "tooling.test_report", "-rfE"]
    if not args.all:
        command += ["-m", "not slow"]
    return "tests", [*command, *args.pytest]


def is_shipped_cuda(file: Path) -> bool:
    return file.parts[0] == "kernel_builds" and file.suffix == ".cu"


def native_sources() -> list[str]:
    endings = (".h", ".cpp", ".cu", ".cuh")
    return [name for name in tracked() if name.endswith(endings)]


def tracked() -> list[str]:
    """Returns the files that git tracks or would add."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        environment.fail(f"{ROOT} is no git checkout: {done.stderr.strip()}")
    return sorted(name for name in set(done.stdout.split("\0")) if name and (ROOT / name).is_file())


def tool(module: str, *arguments: str) -> list:
    return [sys.executable, "-m", module, *arguments]


def passes(name: str, command: list, place: str) -> bool:
    print(f"\n== {name} ({place})", flush=True)
    started = time.monotonic()
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, preexec_fn=processes.end_with(os.getpid()))
    if name == "tests":  # pytest has said it, and the last lines are its summary and ours
        return done.returncode == 0
    verdict = "passed" if done.returncode == 0 else f"FAILED (exit status {done.returncode})"
    print(f"== {name}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
