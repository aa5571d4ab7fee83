"""Tests how `flashcell serve --ray` starts, grows, and ends: by errors, by signals, by kill -9."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from commands import environment
from flashcell.serving.replicas.command import parse_arguments
from replicated import LONG, Replicated, descendants, wait_gone
from served import FOLDER, ROOT, START, check_states

pytest.importorskip("ray.serve", reason='replicas need pip install "flashcell[ray]"')


@pytest.fixture
def start(kernels, tmp_path):
    """Starts one server with replicas, which a test may kill."""
    started = []

    def run(*options: object) -> Replicated:
        variables = {**kernels, "FLASHCELL_API_KEY": "secret"}
        started.append(Replicated(tmp_path, "--ray", "--slots", 4, *options, **variables))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "2"], "--replicas is given, but needs --ray"),
        (["--ray-address", "auto"], "--ray-address is given, but needs --ray"),
        (["--replica-gpus", "0"], "--replica-gpus is given, but needs --ray"),
        (["--ray", "--replicas", "0"], "it is 0, but must be at least 1"),
        (["--ray", "--replicas", "2", "--max-replicas", "3"], "must not be with --min-replicas"),
        (["--ray", "--min-replicas", "2"], "needs --max-replicas"),
        (["--ray", "--min-replicas", "3", "--max-replicas", "2"], "is 2, but must be at least"),
    ],
)
def test_options_that_do_not_fit(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        parse_arguments(["MODEL", *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def failed(*words: object, code: str = START) -> str:
    """Returns what a command says that must fail, without a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", *map(str, words), "--ray"], capture_output=True,
        text=True, cwd=ROOT, env=environment(), timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Ray instance" not in done.stderr, "Ray was started for nothing"
    return done.stderr.splitlines()[-1]


def test_what_cannot_start_says_so_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failed(FOLDER, "--port", port)
    assert said == (
        f"flashcell serve: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )
    assert str(tmp_path / "none") in failed(tmp_path / "none", "--port", 0)
    without = f"import sys; sys.modules['ray'] = None; {START}"
    assert "ray is not installed" in (said := failed(FOLDER, code=without))
    assert 'pip install "flashcell[ray]"' in said


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_command(tmp_path):
    """The replicas cannot start: the command says so, and leaves nothing behind."""
    (tmp_path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    command = [sys.executable, "-c", START, "serve", str(tmp_path), "--ray", "--port", "0"]
    one = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=environment(),
    )  # fmt: skip
    said, _ = one.communicate(timeout=200)
    assert one.returncode == 1
    assert "flashcell serve: the replicas do not start" in said
    assert str(tmp_path) in said
    assert not any("ray::" in name for name in descendants(one.pid).values())


@pytest.mark.slow
def test_more_replicas_under_load_and_fewer_without(start):
    one = start(
        "--max-replicas", 2, "--replica-requests", 2, "--upscale-seconds", 1,
        "--downscale-seconds", 1,
    )  # fmt: skip
    assert one.get("/health").json()["replicas"] == 1
    going = True

    def keep_asking(number: int) -> None:
        while going:
            text, error = one.stream(prompt=f"def f{number}(", max_tokens=100)
            assert (bool(text), error) == (True, None)

    with ThreadPoolExecutor(8) as threads:
        clients = [threads.submit(keep_asking, number) for number in range(8)]
        try:
            wait_for(one, 2)
            deadline = time.monotonic() + 30
            while not all(one.each("new_tokens_total")):
                assert time.monotonic() < deadline, "the second replica gets nothing"
                time.sleep(0.2)
        finally:
            going = False
    assert [client.result() for client in clients] == [None] * 8
    wait_for(one, 1)
    assert one.stop() == 0


def wait_for(one: Replicated, replicas: int) -> None:
    deadline = time.monotonic() + 90
    while one.get("/health").json()["replicas"] != replicas:
        assert time.monotonic() < deadline, one.log()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_finishes_at_the_end(start, number, monkeypatch):
    """Also after Ctrl-C, which reaches all processes of a terminal's group."""
    monkeypatch.setattr(Replicated, "session", True)
    one = start("--replicas", 2)
    begun = [threading.Event() for _ in range(4)]
    below = descendants(one.process.pid)
    with ThreadPoolExecutor(4) as threads:
        streams = [
            threads.submit(one.stream, event, prompt=f"def f{i}(") for i, event in enumerate(begun)
        ]
        assert all(event.wait(60) for event in begun)
        if number == signal.SIGINT:
            os.killpg(one.process.pid, number)
        else:
            one.process.send_signal(number)
        ended = [stream.result() for stream in streams]
    assert [error for _, error in ended] == [None] * 4, one.log()
    assert all(len(text) > LONG["max_tokens"] for text, _ in ended)
    assert one.process.wait(60) == 0, one.log()
    wait_gone(below)


def kill_under_load(one: Replicated, prompt: str, want: str, kill: int) -> dict[int, str]:
    """Kills the server while streams of new prompts run, the later the higher `kill` is; its
    replicas end too, and the next start answers the first request.

    Returns the processes that were below it."""
    below, replicas, folder = descendants(one.process.pid), one.replicas(), one.ray_folder()
    assert replicas
    with ThreadPoolExecutor(4) as threads:
        begun = [threading.Event() for _ in range(4)]
        streams = [  # of so many tokens that they still run at the kill
            threads.submit(
                one.stream, event, prompt=f"def f{kill}_{number}(): # " * 9, max_tokens=4000
            )
            for number, event in enumerate(begun)
        ]
        assert all(event.wait(60) for event in begun)
        time.sleep(0.05 * kill)
        one.kill()
        assert all(stream.exception() is not None for stream in streams)
    one.start()
    assert one.text(prompt) == want
    assert not folder.exists()
    wait_gone(replicas)
    return below


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_server_is_killed_twenty_times(start, tmp_path, model, part):
    """States on disk are whole or gone, and found by the next replica; five times in each part."""
    one = start("--state-folder", tmp_path / "states")
    prompt, below = "def read_" * 8, dict[int, str]()
    want = one.text(prompt)
    for kill in range(5 * part, 5 * part + 5):
        below |= kill_under_load(one, prompt, want, kill)
        assert check_states(tmp_path / "states", model) > 0
        assert not re.search("is not used", one.log())
    answer = one.post(prompt=f"{prompt}x", max_tokens=1, temperature=0).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    wait_gone(below, 90)  # Ray's agents look a while for what was killed
