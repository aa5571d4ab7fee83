"""Runs `flashcell serve --ray` as a process, and looks at the processes below it."""

import contextlib
import json
import os
import re
import threading
import time
from pathlib import Path

import httpx

from served import NAME, Served

LONG = {"max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}


def descendants(pid: int) -> dict[int, str]:
    """Returns the names of the processes below one, by their ids."""
    parents, names = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
            words = (file.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        names[int(file.parent.name)] = words[0].decode()
    below, new = set(), {pid}
    while new:
        new = {one for one, parent in parents.items() if parent in new}
        below |= new
    return {one: names.get(one, "") for one in below}


class Replicated(Served):
    """A server with replicas, and a key that clients must send."""

    headers = {"authorization": "Bearer secret"}  # noqa: RUF012

    def post(self, path: str = "/v1/completions", timeout: float = 120, **asked) -> httpx.Response:
        return httpx.post(
            self.url + path, json={"model": NAME, **asked}, timeout=timeout, headers=self.headers
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=30)

    def replicas(self) -> set[int]:
        """Returns the ids of the replicas' processes."""
        return {
            pid
            for pid, name in descendants(self.process.pid).items()
            if name.startswith("ray::ServeReplica")
        }

    def ray_folder(self) -> Path:
        """Returns the folder that Ray has its files in."""
        pattern = rf"(/\S+/flashcell-ray-{self.process.pid}-\w+)/"
        return Path(re.search(pattern, " ".join(commands(descendants(self.process.pid)))).group(1))

    def each(self, metric: str) -> list[float]:
        """Returns a metric of every replica, the smallest first."""
        pattern = rf'^flashcell_{metric}{{replica="\w+"}} (\S+)$'
        return sorted(map(float, re.findall(pattern, self.get("/metrics").text, re.MULTILINE)))

    def wait(self, metric: str, wanted: list[float], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while (came := self.each(metric)) != wanted:
            assert time.monotonic() < deadline, f"{metric} is {came}, but must be {wanted}"
            time.sleep(0.05)

    def wait_healthy(self, number: int, without: int = 0, seconds: float = 90) -> None:
        """Waits until so many replicas answer, none of which is the process `without`."""
        deadline = time.monotonic() + seconds
        while without in self.replicas() or self.each("running") != [0] * number:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def stream(self, begun: threading.Event | None = None, **asked) -> tuple[str, dict | None]:
        """Returns the text of a stream, and the error that it ended with."""
        text, error, ended = "", None, False
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={"model": NAME, **LONG, **asked},
            headers=self.headers, timeout=120,
        ) as answer:  # fmt: skip
            if answer.status_code != 200:
                return "", json.loads(answer.read())["error"]
            for line in answer.iter_lines():
                if not line:
                    continue
                assert error is None, "an error is the last event"
                assert not ended
                said = line.removeprefix("data: ")
                ended = said == "[DONE]"
                if ended:
                    continue
                chunk = json.loads(said)
                error = chunk.get("error")
                text += "" if error else chunk["choices"][0]["text"]
                if begun is not None:
                    begun.set()
        assert ended != (error is not None)
        return text, error


def open_files(pid: int) -> set[str]:
    """Returns what a process has open; of one that has ended, nothing."""
    names = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def commands(pids) -> list[str]:
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return lines


def wait_gone(pids, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < deadline, f"processes are left over: {commands(left)}"
        time.sleep(0.1)
