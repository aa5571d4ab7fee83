"""A load of requests through HTTP: Poisson arrivals, and what each request waited for."""

import asyncio
import itertools
import json
import math
import random
import re
import statistics
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class Planned(NamedTuple):
    """A request: when it comes, in seconds from the start, its prompt and how many new tokens."""

    at: float
    prompt: list[int]
    new: int


def plan(
    rate: float, requests: int, prompt: tuple[int, int], output: tuple[int, int], vocabulary: int,
    seed: int = 0,
) -> list[Planned]:  # fmt: skip
    """Draws requests that come at `rate` a second, independently, with log-uniform lengths."""
    draw = random.Random(seed)

    def length(low: int, high: int) -> int:
        return min(high, int(low * math.exp(draw.random() * math.log((high + 1) / low))))

    at, planned = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate) if math.isfinite(rate) else 0.0
        ids = [draw.randrange(1, vocabulary) for _ in range(length(*prompt))]
        planned.append(Planned(at, ids, length(*output)))
    return planned


class Reader(asyncio.Protocol):
    """Reads one answer; notes when each piece of it came."""

    def __init__(self, sent: bytes):
        self.sent, self.ended = sent, asyncio.get_running_loop().create_future()
        self.times = list[float]()  # of the events, one or more tokens each
        self.head, self.tail, self.status = b"", b"", 0

    def connection_made(self, transport: Any) -> None:
        self.began = time.perf_counter()
        transport.write(self.sent)

    def data_received(self, data: bytes) -> None:
        if len(self.head) < 64:
            self.head += data[:64]
        events = data.count(b"data: {")
        self.times += [time.perf_counter()] * events
        self.tail = (self.tail + data)[-4096:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class Result(NamedTuple):
    status: int
    tokens: int  # that the server counted
    first: float  # seconds to the first token
    gaps: list[float]  # seconds between the events after it
    mean_gap: float  # seconds for each token after the first
    whole: float


async def stream(url: str, path: str, asked: dict, key: str | None = None) -> Reader:
    """Sends a request and reads its stream to the end."""
    place, body = urlsplit(url), json.dumps(asked).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    head += f"authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(
        lambda: Reader(head.encode() + body), place.hostname, place.port
    )
    error = await reader.ended
    reader.status = int(reader.head.split(b" ")[1]) if reader.head and error is None else 0
    return reader


async def ask(url: str, model: str, planned: Planned, key: str | None = None) -> Result:
    """Sends a planned request and reads its stream to the end."""
    asked = {
        "model": model, "prompt": planned.prompt, "max_tokens": planned.new, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    reader = await stream(url, "/v1/completions", asked, key)
    status = reader.status
    usage = USAGE.search(reader.tail)
    tokens = int(usage.group(1)) if usage and b"[DONE]" in reader.tail else 0
    times = reader.times[:-1]  # the last event is the usage
    if not tokens or not times:
        return Result(status, 0, math.nan, [], math.nan, time.perf_counter() - reader.began)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = (times[-1] - times[0]) / max(tokens - 1, 1)
    return Result(status, tokens, times[0] - reader.began, gaps, mean, times[-1] - reader.began)


async def run(url: str, model: str, planned: list[Planned], key: str | None = None) -> dict:
    """Sends the requests when they are due, whatever became of those before; returns a row."""
    start, tasks = time.perf_counter(), []
    for one in planned:
        await asyncio.sleep(start + one.at - time.perf_counter())
        tasks.append(asyncio.create_task(ask(url, model, one, key)))
    results = await asyncio.gather(*tasks)
    return summary(results, planned, time.perf_counter() - start)


def summary(results: list[Result], planned: list[Planned], seconds: float) -> dict[str, Any]:
    good = [one for one in results if one.status == 200 and one.tokens]
    row = {
        "requests": len(results), "answered": len(good),
        "refused": sum(one.status == 429 for one in results),
        "offered_tokens_per_s": sum(one.new for one in planned) / (planned[-1].at or seconds),
        "tokens_per_s": sum(one.tokens for one in good) / seconds, "seconds": seconds,
    }  # fmt: skip
    measured = {
        "first": [one.first for one in good], "gap": [gap for one in good for gap in one.gaps],
        "per_token": [one.mean_gap for one in good if one.tokens > 1],
        "whole": [one.whole for one in good],
    }  # fmt: skip
    for name, values in measured.items():
        for percent in (50, 95, 99):
            row[f"{name}_p{percent}_ms"] = 1e3 * percentile(values, percent)
    return row


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else math.nan
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
