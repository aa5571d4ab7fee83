"""Carries out the steps of a release, each once: a run that was killed goes on where it was cut.

One file records what is done; it is written whole or not at all. A step that was cut short begins
anew, so every step must allow to be started twice. A step counts as done only for the content that
it was done for, and while the files that it made exist; when a step is repeated, so are all steps
that need it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashcell.utils.whole_file import write_file


class Stop(Exception):
    """The release cannot go on; the message says why, and what to do about it."""


@dataclass(frozen=True)
class Step:
    """One step: data, and a function that returns a line about what it did."""

    name: str
    does: str  # with the verb first, for the output and the help
    run: Callable[[Any], str]
    needs: tuple[str, ...] = ()  # the steps whose results it uses
    makes: tuple[str, ...] = ()  # files in the release's folder
    of: str = "sources"  # what it is done for: "sources", all but the lock, or "commit"


class State:
    """The record of what is done, in the file `file`; `of` says for what: it is empty for another."""

    def __init__(self, file: Path, of: dict[str, str]):
        self.file, self.of = file, of
        self.done: dict[str, dict[str, str]] = {}
        if file.exists():
            try:
                found = json.loads(file.read_text())
                self.done = found["done"] if found["of"] == of else {}
            except (ValueError, KeyError, TypeError) as error:
                raise Stop(
                    f"{file} is not the state of a release ({type(error).__name__}): remove it, and "
                    "every step is taken again"
                ) from None

    def is_done(self, step: Step, key: str) -> bool:
        made = (self.file.parent / name for name in step.makes)
        return self.done.get(step.name, {}).get("key") == key and all(m.exists() for m in made)

    def record(self, step: Step, key: str, said: str) -> None:
        self.done[step.name] = {"key": key, "said": said}
        self._write()

    def forget(self, names: Iterable[str]) -> None:
        self.done = {name: entry for name, entry in self.done.items() if name not in names}
        self._write()

    def _write(self) -> None:
        text = json.dumps({"of": self.of, "done": self.done}, indent=2)
        write_file(self.file, f"{text}\n".encode())


def dependents(steps: list[Step], name: str) -> set[str]:
    """Returns `name` and the steps that need it, themselves or through others."""
    found = {name}
    for step in steps:  # each stands after those that it needs
        if found & set(step.needs):
            found.add(step.name)
    return found


def check(steps: list[Step], skipped: Iterable[str]) -> None:
    """Raises unless every step stands after what it needs, and nothing needs a skipped one."""
    before: set[str] = set()
    for step in steps:
        if missing := set(step.needs) - before:
            raise ValueError(f"the step {step.name} needs {', '.join(missing)} before it")
        before.add(step.name)
    for name in skipped:
        if others := sorted(dependents(steps, name) - {name} - set(skipped)):
            raise Stop(f"--skip is {name}, but {', '.join(others)} need it: skip these too")


def carry_out(
    steps: list[Step],
    state: State,
    release: Any,
    key: Callable[[Step], str],
    skipped: Iterable[str],
) -> int:
    """Takes the steps that are not done, in order; returns how many these were.

    `key` says for which content a step is taken, and may change with the steps before it."""
    wanted = [step for step in steps if step.name not in skipped]
    taken = 0
    for number, step in enumerate(wanted, 1):
        wanted_for = key(step)
        if state.is_done(step, wanted_for):
            continue
        state.forget(dependents(steps, step.name))
        print(f"\n== {step.name} ({number} of {len(wanted)}): {step.does}", flush=True)
        started = time.monotonic()
        said = step.run(release)
        state.record(step, wanted_for, said)
        taken += 1
        print(f"== {step.name}: done, {time.monotonic() - started:.0f} s: {said}", flush=True)
    return taken
