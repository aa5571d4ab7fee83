"""A Hub that hangs, drips, fails or never ends: "auto" goes on with the reference, and in time."""

import pytest

from flashcell.hub.lock_format import read_lock
from hostile_hubs import behaviours, serve

pytestmark = pytest.mark.hub
CPU, AUTO = {"backend": "cpu"}, {"backend": "auto"}


# The rest of a process whose Hub was given up: its downloads end, and they kept little of what came.
AFTERWARDS = """
import resource, threading, time
deadline = time.monotonic() + 10
while [t for t in threading.enumerate() if t.name == "flashcell-download"]:
    assert time.monotonic() < deadline, "a download goes on"
    time.sleep(0.1)
kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
assert kept < 3000, f"{kept} MB"
"""


def revision(chain) -> str:
    return read_lock(chain.folder / "lock.py")["kernels"]["fused-rnn"]["revision"]


@pytest.mark.parametrize("name", list(behaviours("")))
def test_a_hub_that_is_broken_is_given_up(chain, name):
    with serve(behaviours(revision(chain))[name]) as url:
        environment = {"HF_ENDPOINT": url, "FLASHCELL_HUB_TIMEOUT": 2}
        auto, other, explicit = chain.load(AUTO, {"backend": "reference"}, CPU, **environment)
    assert (auto["source"], len(auto["warnings"])) == ("reference", 1)
    assert "is not in the cache and cannot be fetched" in auto["warnings"][0]
    assert explicit["error"] == "KernelUnavailable"
    assert auto["seconds"] + explicit["seconds"] < 2 * 2 + 4, (auto, explicit)
    assert other["source"] == "reference"


@pytest.mark.parametrize("name", [name for name in behaviours("") if "without end" in name])
def test_a_hub_without_end_is_not_read_to_it(chain, name):
    with serve(behaviours(revision(chain))[name]) as url:
        steps = AUTO, {"backend": "reference", "run": AFTERWARDS}
        chain.load(*steps, HF_ENDPOINT=url, FLASHCELL_HUB_TIMEOUT=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs", "answers 500", "sends a byte a second"])
def test_however_many_wait_for_a_broken_hub(chain, name):
    """Eight processes wait at the same time, and no longer than one alone."""
    with serve(behaviours(revision(chain))[name]) as url:
        running = [chain.start(AUTO, HF_ENDPOINT=url) for _ in range(8)]
        outcomes = [process.finish()[0] for process in running]
    assert [o["source"] for o in outcomes] == ["reference"] * 8
    assert max(o["seconds"] for o in outcomes) < 20 + 5


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(chain):
    url, answered = chain.hub.url, []

    def once(connection):
        request = connection.recv(9999).split()[1].decode()
        answered.append(request)
        status = "503 Busy" if len(answered) < 3 else f"302 Found\r\nLocation: {url}{request}"
        head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())

    with serve(once) as busy:
        assert chain.load(CPU, HF_ENDPOINT=busy)[0]["source"] == "hub"


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_machine_that_starts_no_more_threads(chain, allowed):
    run = f"""
import threading
left, start = [{allowed}], threading.Thread.start
def refuse(thread):
    if not left[0]:
        raise RuntimeError("can't start new thread")
    left[0] -= 1
    start(thread)
threading.Thread.start = refuse
"""
    auto, explicit = chain.load(AUTO | {"run": run}, CPU)
    if allowed:
        assert (auto["source"], explicit["source"]) == ("hub", "hub")
    else:
        assert (auto["source"], explicit["error"]) == ("reference", "KernelUnavailable")
        assert "no thread for downloads: can't start new thread" in explicit["message"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_none(chain, text):
    (outcome,) = chain.load(AUTO, FLASHCELL_HUB_TIMEOUT=text)
    assert outcome["error"] == "ValueError"
    assert f"FLASHCELL_HUB_TIMEOUT is {text!r}, but must be" in outcome["message"]
