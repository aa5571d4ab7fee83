"""Tests clients that read slowly, vanish, or never finish what they send: others do not notice."""

import asyncio
import json
import re
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from starlette.requests import Request

from served import NAME, check_states

HEADERS = [(b"content-type", b"application/json")]
LONG = {"prompt": "def read_", "max_tokens": 500, "ignore_eos": True, "stream": True}


def timed(served, prompts: int = 4) -> float:
    """Returns the seconds that some short answers take, one after another."""
    began = time.perf_counter()
    for _ in range(prompts):
        served.text("def read_", max_tokens=30)
    return time.perf_counter() - began


def test_slow_readers_do_not_slow_others(start):
    """Readers that take nothing hold neither slots nor much memory, and get all in the end."""
    one = start("--slots", 4, "--prefill-rows", 4)
    wanted = one.text("def read_", max_tokens=500, ignore_eos=True)
    timed(one, 2)
    before, memory = timed(one), one.memory()
    slow = []
    for _ in range(8):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", one.port))
        # log-probabilities make an answer of megabytes
        connection.sendall(one.request(**LONG, temperature=0, logprobs=5))
        slow.append(connection)
    one.wait_idle(120)  # all of them have ended in the Batcher, though nobody has read
    assert timed(one) < 2 * before + 0.5
    assert one.memory() < memory + 200 * 2**20
    got = b""
    slow[0].settimeout(30)
    while b"data: [DONE]" not in got:
        got += slow[0].recv(2**20)
    got = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", got)  # the lengths of the chunks
    lines = re.findall(rb"data: (\{.*\})\n", got)
    texts = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(texts) == wanted
    for connection in slow:
        connection.close()


@pytest.mark.slow
def test_a_reader_that_never_reads_is_given_up(start):
    one = start("--slots", 4, "--stalled-seconds", 1)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", one.port))
        connection.sendall(one.request(**{**LONG, "max_tokens": 500}, logprobs=5, n=4))
        one.wait_idle(60)
        deadline = time.monotonic() + 20
        while "has read nothing for 1 s" not in one.log():
            assert time.monotonic() < deadline, one.log()
            time.sleep(0.1)


def vanish(served, clients: int, n: int = 1) -> None:
    """Clients that close their connection at many moments of a long answer."""
    for i in range(clients):
        connection = served.connect()
        asked = {**LONG, "n": n, "stream": i % 3 > 0}
        sent = served.request(**asked)
        connection.sendall(sent[: len(sent) // 2] if i % 10 == 9 else sent)
        if i % 4 == 1 and i % 10 != 9 and asked["stream"]:
            connection.recv(100)
        if i % 4 == 2:
            time.sleep(0.01)
        if i % 5 == 3:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()


def test_clients_that_vanish_leave_no_slot(served):
    want = served.text("def read_")
    vanish(served, 100)
    served.wait_idle()
    assert served.text("def read_") == want
    vanish(served, 10, n=5)
    served.wait_idle()
    assert served.text("def read_") == want


def drip(connection, sent: bytes) -> None:
    """Sends a byte at a time until the server closes the connection, which it must."""
    for byte in sent:
        try:
            connection.sendall(bytes([byte]))
        except ConnectionError:
            return
        time.sleep(0.05)
    raise AssertionError("the server waited for all of it")


def test_heads_and_bodies_that_never_end(start):
    one = start("--head-seconds", 1, "--body-seconds", 1, "--slots", 2)
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    post = one.request(prompt="x")
    for sent, status in ((b"", 408), (get, 408), (post[:-5], 408), (get + b"\r\n" + get, 200)):
        began = time.monotonic()
        got = one.raw(sent, 10)
        assert got.startswith(f"HTTP/1.1 {status} ".encode()), got
        assert time.monotonic() - began < 6
    with one.connect() as connection:  # a byte at a time, for longer than is allowed
        connection.settimeout(5)
        drip(connection, get + b"x: " + b"y" * 40)
    assert one.text("def read_")


@pytest.mark.slow
def test_more_connections_than_allowed(start):
    one = start("--max-connections", 8, "--head-seconds", 3)
    idle = [one.connect() for _ in range(8)]
    assert one.raw(b"").startswith(b"HTTP/1.1 503 ")
    for connection in idle:
        connection.close()
    time.sleep(0.2)
    assert one.text("def read_")
    assert httpx.get(f"{one.url}/health").json() == {"status": "ok"}


def test_what_runs_finishes_at_the_end(start, alone):
    """After SIGTERM running streams finish, new connections are refused, and the status is 0."""
    want, _ = alone("def read_", 600)
    one = start("--slots", 4)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x") as client:
            begun = asyncio.Event()

            async def stream() -> str:
                asked = {"model": NAME, "prompt": "def read_", "max_tokens": 600, "temperature": 0}
                text = ""
                async for chunk in await client.completions.create(stream=True, **asked):
                    text += chunk.choices[0].text
                    begun.set()
                return text

            running = [asyncio.create_task(stream()) for _ in range(6)]
            await begun.wait()
            one.process.terminate()
            await asyncio.sleep(0.5)
            with pytest.raises(OSError, match="refused"):
                one.connect()
            return await asyncio.gather(*running)

    assert asyncio.run(run()) == [want] * 6
    assert one.process.wait(30) == 0


def kill_and_start(one, times: int, folder, model) -> None:
    """Kills a server while it reads new prompts, writes their states and sends answers, each time
    a little later; the next start answers the first request."""
    want, seconds, found = one.text("def read_" * 8), [], [check_states(folder, model)]
    for kill in range(times):
        running = [one.connect() for _ in range(6)]
        for number, connection in enumerate(running):
            prompt = f"def f{kill}_{number}(): # " * 9
            connection.sendall(one.request(**{**LONG, "prompt": prompt}))
        running[0].recv(10)
        time.sleep(0.05 * kill)  # reading the prompts takes about half a second
        one.kill()
        found.append(check_states(folder, model))
        one.start()
        began = time.perf_counter()
        assert one.text("def read_" * 8) == want
        seconds.append(time.perf_counter() - began)
        for connection in running:
            connection.close()
    print(f"first answer of the next start after at most {max(seconds):.2f} s; states: {found}")
    assert found[-1] > found[0], "no kill came while there were new states"


def test_a_client_with_requests_behind_each_other_vanishes(served):
    """The server does not read on while a request waits for the answer to an earlier one."""
    asked = {**LONG, "max_tokens": 4000, "n": 2, "stream": False}
    for behind in (1, 5):
        before = served.metric("new_tokens_total")
        with served.connect() as connection:
            connection.sendall(served.request(**asked) * (1 + behind))
            deadline = time.monotonic() + 20
            while served.metric("running") != 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        served.wait_idle(120)
        made = served.metric("new_tokens_total") - before
        assert made < 2 * 4000, "it decodes for nobody"


def test_large_bodies_take_few_threads():
    """Two at a time are read, and those of clients that have gone not at all."""
    from flashcell.serving import app
    from flashcell.serving.errors import ApiError, ClientGone

    body, reading, read = b" " * (app.LARGE + 1), [], []
    go_on = threading.Event()

    def prepare(_, given: bytes) -> None:
        reading.append(len(given))
        assert go_on.wait(20)
        read.append(reading.pop())
        raise ApiError(400, "it was read")

    async def receive() -> dict:
        return {"type": "http.request", "body": body}

    async def run() -> None:
        limits = SimpleNamespace(body_bytes=2 * len(body))
        server = SimpleNamespace(
            protocol=SimpleNamespace(limits=limits), body_seconds=10, states=None, prepare=prepare,
            large=asyncio.Semaphore(app.LARGE_AT_ONCE),
        )  # fmt: skip

        async def ask(number: int) -> type:
            request = Request({"type": "http", "headers": HEADERS}, receive)
            request._is_disconnected = number % 3 == 2
            try:
                await app.Server.answer(server, request, None)
            except (ApiError, ClientGone) as error:
                return type(error)

        tasks = [asyncio.ensure_future(ask(number)) for number in range(12)]
        while len(reading) < app.LARGE_AT_ONCE:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(reading) == app.LARGE_AT_ONCE
        go_on.set()
        assert await asyncio.gather(*tasks) == [ApiError, ApiError, ClientGone] * 4
        assert len(read) == 8

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_a_request_that_is_cancelled_ends(turns):
    """However many turns of the event loop after its begin: a lost cancellation would let it run on."""
    from flashcell.serving.app import read_body

    async def receive() -> dict:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"{}"}

    async def read() -> str:
        await read_body(Request({"type": "http", "headers": HEADERS}, receive), 100, 10)
        while True:  # the answer
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.ensure_future(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        assert done

    asyncio.run(run())


def test_a_killed_server_starts_again(start, tmp_path):
    """States on disk are whole or gone, and the next start finds those that are whole."""
    one = start("--state-folder", tmp_path / "states", "--slots", 4)
    ids = list(range(100, 150))
    assert one.post(prompt=ids, max_tokens=2).status_code == 200
    deadline = time.monotonic() + 20
    while not any(file.name.startswith("50-") for file in (tmp_path / "states").rglob("*")):
        assert time.monotonic() < deadline, "the state is not written"
        time.sleep(0.05)
    one.kill()
    one.start()
    again = one.post(prompt=[*ids, 7], max_tokens=2).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 50
    assert "is not used" not in one.log()


@pytest.mark.slow
def test_a_server_is_killed_twenty_times(start, tmp_path, model):
    """Takes 3 to 4 minutes; pytest -n 0 -s -m slow tests/serving -k killed shows what it found."""
    one = start("--state-folder", tmp_path / "states", "--slots", 4)
    kill_and_start(one, 20, tmp_path / "states", model)
    assert "is not used" not in one.log()
