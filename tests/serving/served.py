"""Runs `flashcell serve` as a process, and talks to it without a client library."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from commands import environment
from flashcell.state.rows import state_shapes
from flashcell.state.serialization import read_state

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_cards/flash-rnn-python-5m"
NAME = FOLDER.name
START = "from flashcell.cli import main; main()"
TEMPLATE = r"""{% for m in messages %}{{ "# " + m.role + "\n" + m.content + "\n" }}{% endfor %}
{{ "# assistant\n" }}"""


class Served:
    """A server process, with its URL."""

    session = False  # whether signals to the group of this process do not reach it

    def __init__(self, folder: Path, *options: object, model: object = FOLDER, **variables: str):
        self.folder, self.options, self.model = folder, options, model
        self.variables = variables
        (folder / "chat.jinja").write_text(TEMPLATE)
        self.start()

    def start(self) -> None:
        command = [
            sys.executable, "-c", START, "serve", self.model, "--port", "0", "--threads", "1",
            "--name", NAME, "--chat-template", self.folder / "chat.jinja", *self.options,
        ]  # fmt: skip
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, cwd=ROOT,
                env=environment(**self.variables), start_new_session=self.session,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while not (found := re.search(r"running on http://\S+?:(\d+)", self.log())):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        self.port = int(found.group(1))
        self.url = f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def post(self, path: str = "/v1/completions", timeout: float = 60, **asked) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": NAME, **asked}, timeout=timeout)

    def text(self, prompt, **asked) -> str:
        answer = self.post(prompt=prompt, **{"temperature": 0, "max_tokens": 12, **asked})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def raw(self, sent: bytes, seconds: float = 10.0) -> bytes:
        """Sends bytes; returns what comes until the server closes, or for so many seconds."""
        with self.connect() as connection:
            connection.settimeout(seconds)
            connection.sendall(sent)
            got = b""
            while True:
                try:
                    more = connection.recv(65536)
                except TimeoutError:
                    return got
                except ConnectionResetError:
                    return got
                if not more:
                    return got
                got += more

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10)

    def request(self, path: str = "/v1/completions", **asked) -> bytes:
        """Returns the bytes of a request."""
        body = json.dumps({"model": NAME, **asked}).encode()
        return (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf"^flashcell_{name} (\S+)$", text, re.MULTILINE).group(1))

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Waits until nothing runs or waits."""
        deadline = time.monotonic() + seconds
        while self.metric("running") + self.metric("waiting"):
            assert time.monotonic() < deadline, "choices are left over"
            time.sleep(0.05)

    def memory(self) -> int:
        """Returns the bytes that the process has in memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def check_states(folder: Path, model) -> int:
    """Checks that every state on disk is whole, with all of its tokens; returns how many there are.

    What a killed writer leaves has another name, if it leaves anything."""
    files = list(folder.rglob("*.safetensors"))
    for file in files:
        _, ids = read_state(model.config, file, state_shapes(model))  # compares the file's SHA-256
        assert len(ids) == int(file.name.partition("-")[0])
    return len(files)
