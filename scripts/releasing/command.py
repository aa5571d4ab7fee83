"""Runs a release or a rehearsal: what scripts/release does once its environment is there."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from flashcell.hub.lock_format import LockError
from releasing import people, progress
from releasing.progress import State, Step, Stop
from releasing.release import Rehearsal, Release, check_clean, git, opened, package_version
from releasing.steps import ROOT, steps
from tooling import processes
from tooling.builder import MACHINES, BuildError

NO_SIGNATURES = "signatures, because a rehearsal has nobody's identity"


def run(args: argparse.Namespace, home: Path, started: float) -> int:
    """Returns the exit status."""
    kind = Rehearsal if args.rehearse else Release
    try:
        version = package_version()
        backends = [*(args.backend or ["cpu", "cuda"]), "universal"]
        machines = args.machine or list(MACHINES)
        release = kind(version, home, backends, machines, args.archs, args.here)
        todo = steps(args.rehearse)
        progress.check(todo, args.skip)
        check_clean()
        release.folder.mkdir(parents=True, exist_ok=True)
        with processes.locked(release.folder / "lock") as release.handle, opened(release):
            state = State(release.folder / "state.json", release.what())
            if args.list:
                print(listing(todo, state, release))
                return 0
            if not args.rehearse:
                warn(version)
            taken = progress.carry_out(todo, state, release, release.key, args.skip)
            print(summary(args, todo, state, release, taken, time.monotonic() - started))
    except (Stop, BuildError, LockError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def warn(version: str) -> None:
    """Says at the start what the release will stop at, for a person to do it meanwhile."""
    for problem in people.missing(version):
        print(f"not there yet: {problem}", flush=True)


def listing(todo: list[Step], state: State, release: Release) -> str:
    done = {step.name: state.is_done(step, release.key(step)) for step in todo}
    return "\n".join(
        f"{step.name:10} {'done' if done[step.name] else 'to do':6} {step.does}" for step in todo
    )


def summary(
    args: argparse.Namespace,
    todo: list[Step],
    state: State,
    release: Release,
    taken: int,
    seconds: float,
) -> str:
    """Returns what was made, and in plain words what was left out."""
    what = "rehearsal of flashcell" if args.rehearse else "flashcell"
    commit = git(ROOT, "rev-parse", "HEAD")[:12]
    lines = ["", f"{what} {release.version}, commit {commit}"]
    lines += [f"  {s.name:10} {state.done[s.name]['said']}" for s in todo if s.name in state.done]
    left_out = [f"the step {name}, because of --skip" for name in args.skip]
    if args.rehearse:
        left_out.append(NO_SIGNATURES)
        if "cuda" not in release.backends:
            left_out.append("kernels and packages for cuda, because of --backend")
        if release.archs:
            left_out.append(f"CUDA archs but {release.archs}, because of --archs")
        others = sorted({*MACHINES} - {*release.machines})
        left_out += [f"kernels and packages for {name}, because of --machine" for name in others]
    lines += [f"left out: {line}" for line in left_out]
    if not args.rehearse:
        lines.append(f"left for a person: the tag and the release page, {people.PAGE}")
    spent = f"in {seconds / 60:.1f} minutes"
    lines.append(f"scripts/release: {taken} steps done {spent}" if taken else
                 "scripts/release: nothing to do, every step is done for this commit")  # fmt: skip
    return "\n".join(lines)
