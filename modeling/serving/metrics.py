"""What the server counts, for Prometheus, at /metrics."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..state.prefix_states import PrefixStates
from .engine import Choice, Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """Counters of one server, and what its engine and its states say when they are asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "flashcell"

        def histogram(what: str, said: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{name}_{what}", said, buckets=buckets, registry=self.registry)

        def counter(what: str, said: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"{name}_{what}", said, labels, registry=self.registry)

        self.requests = counter("http_requests", "HTTP requests", ("path", "status"))
        self.ended = counter("choices", "choices that ended", ("reason",))
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "tokens of prompts that a state held")
        self.new_tokens = counter("new_tokens", "tokens generated")
        self.first = histogram("first_token_seconds", "to the first token", SECONDS)
        self.between = histogram("token_seconds", "between tokens, the mean of a choice",
                                 TOKEN_SECONDS)  # fmt: skip
        self.whole = histogram("answer_seconds", "to the end of a choice", SECONDS)
        self.step = histogram("step_seconds", "a step of the batch", TOKEN_SECONDS)

    def watch(self, engine: Engine, states: PrefixStates | None) -> None:
        self.registry.register(Watched(engine, states))  # type: ignore[arg-type]

    def choice_ended(self, choice: Choice) -> None:
        self.ended.labels(choice.reason or "cancelled").inc()
        self.prompt_tokens.inc(choice.prompt_tokens)
        self.cached_tokens.inc(choice.cached_tokens)
        self.new_tokens.inc(len(choice.tokens))
        if choice.tokens and choice.live:
            self.first.observe(choice.first - choice.began)
            if len(choice.tokens) > 1:
                self.between.observe((choice.last - choice.first) / (len(choice.tokens) - 1))
        if choice.reason is not None:
            self.whole.observe(time.perf_counter() - choice.began)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Watched:
    """Reads gauges when they are asked for."""

    def __init__(self, engine: Engine, states: PrefixStates | None):
        self.engine, self.states = engine, states

    def collect(self) -> Iterator[Any]:
        batch = self.engine.batcher.batch
        running = sum(one is not None for one in (*batch.slots, *batch.prefill_rows))
        unfinished = len(self.engine.unfinished)
        yield gauge("running", "choices in slots and prefill rows", running)
        yield gauge("waiting", "choices that wait", max(unfinished - running, 0))
        yield gauge("slots", "sequences decoded together", self.engine.slots)
        if self.states is not None:
            states = self.states
            yield gauge("states", "states kept in memory", len(states))
            yield gauge("states_device_bytes", "their bytes on the device", states.used[True])
            yield gauge("states_host_bytes", "their bytes in host memory", states.used[False])
            yield CounterMetricFamily("flashcell_state_hits", "prompts with a state",
                                      value=states.hits)  # fmt: skip
            yield CounterMetricFamily("flashcell_state_misses", "prompts without",
                                      value=states.misses)  # fmt: skip
            said = "tokens of prompts that were not read again"
            yield CounterMetricFamily("flashcell_state_tokens", said, value=states.tokens_saved)
            if states.folder is not None:
                yield gauge("states_disk_bytes", "bytes of states on disk", states.folder.used)


def gauge(what: str, said: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"flashcell_{what}", said, value=value)
