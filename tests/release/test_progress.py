"""Steps are taken once each, whatever happens to the process that takes them."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from releasing.progress import State, Step, Stop, carry_out, check, dependents

NAMES = ("first", "second", "third", "fourth", "fifth")
OF = {"version": "1", "sources": "abc"}


def note(folder: Path, line: str) -> None:
    with open(folder / "log", "a") as file:
        file.write(f"{line}\n")


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


def toy(pause: str = "", seconds: float = 60.0) -> list[Step]:
    """Returns steps that note their beginning and end; at `pause`, "began-NAME" or "ended-NAME", they
    wait."""

    def run(name: str):
        def work(folder: Path) -> str:
            for moment in ("began", "ended"):
                note(folder, f"{moment}-{name}")
                if pause in (f"{moment}-{name}", "all"):
                    time.sleep(seconds)
            return f"{name} in process {os.getpid()}"

        return work

    before = ("", *NAMES)
    return [
        Step(n, "do it", run(n), (b,) if b else ()) for n, b in zip(NAMES, before, strict=False)
    ]


def take(folder: Path, steps: list[Step], key: str = "key", skipped=()) -> int:
    state = State(folder / "state.json", OF)
    return carry_out(steps, state, folder, lambda step: key, skipped)


def process(folder: Path, steps: list[Step]) -> int:
    """Starts a process that takes the steps; returns its number."""
    if pid := os.fork():
        return pid
    take(folder, steps)
    os._exit(0)


@pytest.mark.parametrize("moment", ["began", "ended"])
def test_killed_in_every_step_and_resumed(tmp_path, moment):
    """A step that was killed is taken again, even if only its record was missing; none before it is."""
    for number, name in enumerate(NAMES):
        killed = process(tmp_path, toy(f"{moment}-{name}"))
        deadline = time.monotonic() + 30
        while f"{moment}-{name}" not in log(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(killed, signal.SIGKILL)
        assert os.waitpid(killed, 0)[1] == signal.SIGKILL
        assert list(State(tmp_path / "state.json", OF).done) == list(NAMES[:number])
    assert take(tmp_path, toy()) == 1
    count = log(tmp_path).count
    assert [count(f"began-{name}") for name in NAMES] == [2] * len(NAMES)
    assert [count(f"ended-{name}") for name in NAMES] == [1 if moment == "began" else 2] * len(
        NAMES
    )
    assert take(tmp_path, toy()) == 0


def test_killed_at_random(tmp_path):
    """The record is whole at every moment, and names no step that has not ended."""
    drawn, kills = random.Random(0), 0
    for attempt in range(200):
        folder = tmp_path / str(attempt)  # another one if a slow machine let the process end early
        folder.mkdir()
        done: set[str] = set()
        while done != set(NAMES):
            pid = process(folder, toy("all", seconds=0.01))
            time.sleep(drawn.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            kills += os.waitpid(pid, 0)[1] != 0
            done = set(State(folder / "state.json", OF).done)
            assert all(f"ended-{name}" in log(folder) for name in done)
        if kills > 2:
            return
    pytest.fail(f"only {kills} processes were killed before they ended")


def test_a_step_that_is_taken_again_takes_those_that_need_it(tmp_path, capsys):
    steps = toy()
    (tmp_path / "made").touch()
    steps[1] = replace(steps[1], makes=("made",))
    assert take(tmp_path, steps) == 5
    assert "== second (2 of 5): do it" in capsys.readouterr().out
    (tmp_path / "made").unlink()
    assert take(tmp_path, steps) == 4  # it is gone, so the second step is taken, and what follows
    (tmp_path / "made").touch()
    assert take(tmp_path, steps) == 0
    assert take(tmp_path, steps, key="another commit") == 5


def test_a_failed_step_is_not_done(tmp_path):
    def fail(folder):
        raise Stop("no")

    steps = toy()
    steps[2] = replace(steps[2], run=fail)
    with pytest.raises(Stop):
        take(tmp_path, steps)
    assert take(tmp_path, toy()) == 3


def test_the_record_is_of_one_release(tmp_path):
    take(tmp_path, toy())
    assert State(tmp_path / "state.json", OF | {"sources": "def"}).done == {}
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(
        Stop, match=r"state\.json is not the state of a release \(JSONDecodeError\)"
    ):
        State(tmp_path / "state.json", OF)


def test_a_skipped_step_is_not_recorded(tmp_path):
    free = [replace(step, needs=()) for step in toy()]
    assert take(tmp_path, free, skipped=["second"]) == 4
    assert "second" not in json.loads((tmp_path / "state.json").read_text())["done"]
    assert take(tmp_path, free) == 1


def test_what_is_needed_cannot_be_skipped():
    steps = toy()
    assert dependents(steps, "third") == {"third", "fourth", "fifth"}
    with pytest.raises(Stop, match="--skip is third, but fifth, fourth need it: skip these too"):
        check(steps, ["third"])
    check(steps, ["fourth", "fifth"])
    with pytest.raises(ValueError, match="the step first needs fifth before it"):
        check([replace(steps[0], needs=("fifth",)), *steps[1:]], [])
