"""Tests which replica the router chooses: the one that has read the beginning, if it has time."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason='replicas need pip install "flashcell[ray]"')

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import RequestRoutingContext

from flashcell.serving.replicas import router as under_test
from flashcell.serving.replicas.router import PrefixRouter

SLOTS, ALL = 2, {"a", "b", "c"}


class Replicas:
    """A router with replicas that only have names."""

    def __init__(self, *names: str):
        self.router = PrefixRouter(
            DeploymentID("model", "app"),
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(slots=SLOTS)
        self.replace(*names)

    def replace(self, *names: str) -> None:
        self.known = {
            name: SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("model", "app")))
            for name in names
        }
        self.router._replicas = {one.replica_id: one for one in self.known.values()}

    def request(self, *beginnings: tuple[bytes, float]) -> SimpleNamespace:
        return SimpleNamespace(
            kwargs={"beginnings": list(beginnings)}, routing_context=RequestRoutingContext()
        )

    def route(self, name: str, *beginnings: tuple[bytes, float]) -> None:
        self.router.on_request_routed(self.request(*beginnings), self.known[name].replica_id, None)

    def send(self, name: str, requests: int = 1) -> None:
        for _ in range(requests):
            self.router.on_send_request(self.known[name].replica_id)

    async def update(self) -> None:
        """Tells the router that there are no replicas, as Ray does in its event loop."""
        self.router.update_replicas([])

    def complete(self, name: str) -> None:
        self.router.on_request_completed(self.known[name].replica_id, "a request")

    def choose(self, *beginnings: tuple[bytes, float]) -> str:
        """Returns the replica that is tried first, checking that all are tried behind it."""
        everyone = list(self.known.values())
        (first,), rest = asyncio.run(
            self.router.choose_replicas(everyone, self.request(*beginnings))
        )
        assert {one.replica_id for one in rest} == {one.replica_id for one in everyone}
        return first.replica_id.unique_id

    def chosen(self, *beginnings: tuple[bytes, float]) -> set[str]:
        """Returns the replicas that are tried first, one time or another."""
        found = set()
        for _ in range(40):
            found.add(self.choose(*beginnings))
            self.router.promised.clear()
        return found


@pytest.fixture
def replicas() -> Replicas:
    return Replicas("a", "b", "c")


def test_the_reader_of_the_longest_beginning_is_preferred(replicas):
    replicas.route("a", (b"1", 0.5), (b"2", 1.0))
    replicas.route("b", (b"1", 0.3), (b"2", 0.6), (b"3", 1.0))
    assert replicas.chosen((b"1", 0.4), (b"2", 0.7), (b"3", 0.9), (b"4", 1.0)) == {"b"}
    assert replicas.chosen((b"1", 0.4), (b"2", 0.7), (b"9", 1.0)) == {"a", "b"}
    assert replicas.chosen((b"8", 1.0)) == ALL
    assert replicas.chosen() == ALL


def test_a_beginning_of_less_than_half_is_read_again(replicas):
    replicas.route("a", (b"1", 1.0))
    assert replicas.chosen((b"1", 0.5), (b"2", 1.0)) == {"a"}
    assert replicas.chosen((b"1", 0.49), (b"2", 1.0)) == ALL


def test_a_full_reader_is_not_preferred(replicas):
    replicas.route("a", (b"1", 1.0))
    replicas.send("a", SLOTS - 1)
    assert replicas.chosen((b"1", 1.0)) == {"a"}
    replicas.send("a")
    assert replicas.chosen((b"1", 1.0)) == {"b", "c"}
    replicas.route("b", (b"1", 1.0))
    assert replicas.chosen((b"1", 1.0)) == {"b"}


def test_the_least_loaded_is_chosen_when_nobody_has_read_it(replicas):
    for name, requests in (("a", 5), ("b", 3), ("c", 4)):
        replicas.send(name, requests)
    assert replicas.chosen((b"1", 1.0)) == {"b"}


def test_requests_are_counted_until_they_are_completed(replicas):
    """However late a replica's reply comes: it counts the requests of its own time."""
    replicas.route("a", (b"1", 1.0))
    replicas.send("a", SLOTS)
    replicas.router.on_new_queue_len_info(replicas.known["a"].replica_id, 1)
    assert replicas.chosen((b"1", 1.0)) == {"b", "c"}
    replicas.complete("a")
    assert replicas.chosen((b"1", 1.0)) == {"a"}
    for _ in range(3):
        replicas.complete("a")
    assert replicas.router.load(replicas.known["a"]) == 0
    replicas.send("a", SLOTS)
    asyncio.run(replicas.update())
    assert replicas.router.load(replicas.known["a"]) == 0


def test_requests_at_once_count_before_they_are_sent(replicas, monkeypatch):
    replicas.route("a", (b"1", 1.0))
    assert [replicas.choose((b"1", 1.0)) for _ in range(SLOTS)] == ["a"] * SLOTS
    assert {replicas.choose((b"1", 1.0)) for _ in range(4)} == {"b", "c"}
    replicas.send("a")
    assert replicas.router.load(replicas.known["a"]) == SLOTS, "it is counted twice"
    monkeypatch.setattr(under_test, "PROMISE_SECONDS", -1.0)
    assert replicas.router.load(replicas.known["a"]) == 1, "one that was never sent counts for ever"


def test_a_reader_that_is_gone_is_forgotten(replicas):
    replicas.route("a", (b"1", 1.0))
    replicas.replace("b", "c", "d")
    assert replicas.chosen((b"1", 1.0)) == {"b", "c", "d"}
    replicas.route("d", (b"1", 1.0))
    assert len(replicas.router.places[b"1"]) == 1


def test_what_is_remembered_is_bounded(replicas, monkeypatch):
    monkeypatch.setattr(under_test, "KNOWN", 3)
    for number in range(5):
        replicas.route("a", (bytes([number]), 1.0))
        replicas.route("b", (b"often", 1.0))
    assert len(replicas.router.places) == 3
    assert replicas.chosen((b"often", 1.0)) == {"b"}
    assert replicas.chosen((bytes([0]), 1.0)) == ALL


def test_metrics_are_told_apart_and_http_requests_counted_once():
    from prometheus_client import generate_latest

    from flashcell.serving.metrics import Metrics
    from flashcell.serving.replicas.front import Together

    front, one, two = Metrics(), Metrics(), Metrics()
    front.requests.labels("/", "200").inc(3)
    one.requests.labels("/", "200").inc(2)
    one.new_tokens.inc(5)
    two.new_tokens.inc(7)
    both = [("one", one.text().decode()), ("two", two.text().decode())]
    text = generate_latest(Together(front.text().decode(), both)).decode()
    lines = text.splitlines()
    assert "flashcell_replicas 2.0" in lines
    assert 'flashcell_new_tokens_total{replica="one"} 5.0' in lines
    assert 'flashcell_new_tokens_total{replica="two"} 7.0' in lines
    assert [line for line in lines if line.startswith("flashcell_http_requests_total")] == [
        'flashcell_http_requests_total{path="/",status="200"} 3.0'
    ]
    assert lines.count("# TYPE flashcell_new_tokens_total counter") == 1
