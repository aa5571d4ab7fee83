"""Tests `flashcell serve --ray`: replicas answer as one server, and one that is killed is replaced."""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from replicated import LONG, Replicated, descendants, open_files, wait_gone
from served import NAME

pytest.importorskip("ray.serve", reason='replicas need pip install "flashcell[ray]"')

SLOTS = 3
LOST = "the replica that made this answer has ended: try again"


@pytest.fixture(scope="module")
def replicated(kernels, tmp_path_factory):
    """Two replicas, for all tests of this file that leave them as they were."""
    one = Replicated(
        tmp_path_factory.mktemp("replicated"), "--ray", "--replicas", 2, "--slots", SLOTS,
        "--prefill-rows", 4, **{**kernels, "FLASHCELL_API_KEY": "secret"},
    )  # fmt: skip
    yield one
    below = descendants(one.process.pid)
    assert one.replicas()
    folder = one.ray_folder()
    assert folder.exists()
    assert one.stop() == 0, one.log()
    wait_gone(below)
    assert not folder.exists()


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_one_model(replicated, alone, stream):
    prompts = ["def read_", "import ", "class Test", "for i in "] * 2
    wanted = [alone(prompt, 40, seed, temperature=0.8)[0] for seed, prompt in enumerate(prompts)]

    def ask(seed: int) -> str:
        asked = {"prompt": prompts[seed], "max_tokens": 40, "seed": seed, "temperature": 0.8}
        asked["ignore_eos"] = False
        if stream:
            text, error = replicated.stream(**asked)
            assert error is None
            return text
        return replicated.post(**asked).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == wanted
    assert all(replicated.each("new_tokens_total")), "one replica has done nothing"


def test_errors_are_those_of_one_server(replicated):
    for asked, status, said in (
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens is -1"),
        ({"prompt": "x", "nothing": 1}, 400, 'unknown field "nothing"'),
        ({"prompt": "x", "model": "other"}, 404, "model is 'other'"),
        ({"prompt": [1] * 40_000}, 400, "prompt has 40000 tokens"),
        ({"prompt": "x" * 5 * 2**20}, 413, "the body has"),
    ):
        answer = replicated.post(**asked)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)
    malformed = httpx.post(
        f"{replicated.url}/v1/completions", content=b"{", timeout=30,
        headers={**replicated.headers, "content-type": "application/json"},
    )  # fmt: skip
    assert "is not JSON" in malformed.json()["error"]["message"]
    assert replicated.get("/nothing").status_code == 404
    assert replicated.get("/v1/models").json()["data"][0]["id"] == NAME
    assert replicated.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert replicated.get("/health").json() == {"status": "ok", "replicas": 2}
    assert "<html" in replicated.get("/").text


def test_the_door_is_the_same(replicated):
    for path, status in (("/health", 200), ("/", 200), ("/metrics", 401), ("/v1/models", 401)):
        assert httpx.get(replicated.url + path).status_code == status
    other = {**replicated.headers, "host": "elsewhere.example"}
    assert httpx.get(f"{replicated.url}/v1/models", headers=other).status_code == 421


def test_ray_listens_on_this_machine_alone(replicated):
    """No process of the server listens on an address that another machine reaches."""
    pids = (*descendants(replicated.process.pid), replicated.process.pid)
    sockets = {name for pid in pids for name in open_files(pid)}
    open_to = [
        fields[1]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets  # 0A: it listens
    ]
    assert len(open_to) > 3
    loopback = "0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"
    assert [one for one in open_to if one.partition(":")[0] not in loopback] == []


def test_a_chat_stays_where_its_states_are(replicated):
    """Several at once, spread over the replicas: each turn reads only its new tokens."""
    talks = [[] for _ in range(12)]  # a replica is drawn for each: all get one in 0.05 % of runs
    for turn in range(3):
        for number, talk in enumerate(talks):
            said = f"# talk {number}: " + "x = y + z\n" * 20 if turn == 0 else f"turn {turn}"
            talk.append({"role": "user", "content": said})
            answer = replicated.post(
                "/v1/chat/completions", messages=talk, max_tokens=16, temperature=0
            ).json()
            talk.append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            )
            usage = answer["usage"]
            if turn:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= len(talks[number][0]["content"]) // 4, (turn, number)
                assert usage["prompt_tokens"] - cached < 60
    assert all(count > 100 for count in replicated.each("cached_tokens_total")), "all went to one"


def test_what_the_reader_has_no_time_for_goes_elsewhere(replicated):
    prompt = "# the same beginning for all\n" * 30
    replicated.post(prompt=prompt, max_tokens=1)
    begun = [threading.Event() for _ in range(SLOTS)]
    with ThreadPoolExecutor(SLOTS) as threads:
        streams = [threads.submit(replicated.stream, one, prompt=prompt) for one in begun]
        assert all(one.wait(30) for one in begun)
        assert replicated.each("running") == [0, SLOTS]
        assert replicated.post(prompt=prompt, max_tokens=2).status_code == 200
        assert [stream.result()[1] for stream in streams] == [None] * SLOTS


def test_clients_that_vanish_leave_no_slot(replicated):
    for number in range(30):
        with replicated.connect() as connection:
            asked = {**LONG, "prompt": f"def f{number}(", "max_tokens": 2000, "stream": number % 2}
            sent = replicated.request(**{**asked, "stream": bool(number % 2)})
            connection.sendall(
                sent.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer secret\r\n\r\n")
            )
            if number % 4 == 1:
                connection.recv(100)
    replicated.wait("running", [0, 0])
    replicated.wait("waiting", [0, 0])


def kill_one(server: Replicated, wanted: list[str]) -> None:
    """Kills a replica in the middle of its streams, of which every replica has some.

    Those end with an error, all others with what they must say; then there is a new one."""
    begun = [threading.Event() for _ in wanted]
    before = server.replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(len(wanted)) as threads:
        streams = [
            threads.submit(server.stream, one, prompt=f"def f{number}(")
            for number, one in enumerate(begun)
        ]
        assert all(one.wait(60) for one in begun)
        running = server.each("running")
        assert sum(running) == len(wanted)
        assert min(running) > 0
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        ended = [stream.result() for stream in streams]
    errors = [error for _, error in ended if error is not None]
    assert len(errors) in running, Counter(map(str, errors))
    for error in errors:
        assert error == {
            "message": LOST, "type": "server_error", "param": None, "code": "replica_lost",
        }  # fmt: skip
    for (text, error), whole in zip(ended, wanted, strict=True):
        assert whole.startswith(text)
        assert error is not None or text == whole
    assert server.post(prompt="def read_", max_tokens=2).status_code == 200
    server.wait_healthy(2, without=victim)


@pytest.fixture(scope="module")
def wanted(replicated) -> list[str]:
    """Returns what the streams of kill_one say when nobody is killed."""
    with ThreadPoolExecutor(4) as threads:
        prompts = [f"def f{number}(" for number in range(4)]
        return [text for text, _ in threads.map(lambda one: replicated.stream(prompt=one), prompts)]


def test_a_killed_replica_ends_its_streams_alone(replicated, wanted):
    for _ in range(2):
        kill_one(replicated, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_replicas_are_killed_twenty_times(replicated, wanted, part):
    """Ten times in each part."""
    for _ in range(10):
        kill_one(replicated, wanted)
