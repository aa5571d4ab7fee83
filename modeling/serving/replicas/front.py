"""The HTTP side of `flashcell serve --ray`: takes requests, and has a replica answer each.

Clients meet the same connections, door and limits as without replicas (connections.py, door.py);
Ray Serve chooses a replica by router.py, and waits while all are full. A replica that ends in the
middle of an answer ends that answer with an error, and no other.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from ..app import SMALL, plain_app, read_body
from ..door import Door
from ..errors import ApiError, of_server
from ..metrics import Metrics
from .beginnings import Beginning, beginnings
from .cluster import APPLICATION, DEPLOYMENT

logger = logging.getLogger(__name__)
METRICS_SECONDS = 10.0  # in which replicas must say their metrics
HTTP_REQUESTS = "flashcell_http_requests"  # counted here, not by the replicas


@dataclass
class Front:
    """All that the routes need."""

    handle: DeploymentHandle
    metrics: Metrics
    body_bytes: int
    body_seconds: float
    key: str | None = None
    hosts: set[str] | None = None

    async def answer(self, request: Request) -> Response:
        body, found = b"", list[Beginning]()
        if request.method == "POST":
            body = await read_body(request, self.body_bytes, self.body_seconds)
            chat = request.url.path.endswith("/chat/completions")
            if len(body) > SMALL:
                found = await asyncio.to_thread(beginnings, body, chat)
            else:
                found = beginnings(body, chat)
        return Forwarded(
            self.handle.options(method_name="answer", stream=True).remote(
                request.method, request.url.path, [(b"content-type", b"application/json")], body,
                beginnings=found,
            )
        )  # fmt: skip

    async def replica_metrics(self) -> list[tuple[str, str]]:
        """Returns the number and the metrics of every replica that answers."""
        asked = self.handle.broadcast("metrics")
        said = await asked.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        return [one for one in said if not isinstance(one, BaseException)]


class Forwarded(Response):
    """A replica's answer, as it comes, until its end or until the client has gone."""

    def __init__(self, pieces: DeploymentResponseGenerator):
        self.pieces, self.gone, self.background = pieces, False, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watch = asyncio.ensure_future(self._until_gone(receive))
        head: dict[str, Any] | None = None
        begun = stream = False  # whether anything has been sent; of events
        directly = scope.get("flashcell.send", send)
        try:
            async for piece in self.pieces:
                if head is None:
                    head = {"type": "http.response.start", "status": piece[0], "headers": piece[1]}
                    continue
                if not begun:  # not before: until then an error has a status of its own
                    begun, stream = True, is_stream(head["headers"])
                    await send(head)
                await directly({"type": "http.response.body", "body": piece, "more_body": True})
            if not begun and head is not None:
                await send(head)
            await send({"type": "http.response.body", "body": b""})
        except Exception as error:
            if self.gone:
                return
            told = told_of(error)
            if not begun:
                raise told from None
            if not stream:
                raise  # the client sees that the connection breaks
            event = b"data: " + told.content() + b"\n\n"
            await send({"type": "http.response.body", "body": event})
        finally:
            watch.cancel()
            self.pieces.cancel()

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.pieces.cancel()


def is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def told_of(error: Exception) -> ApiError:
    """Returns what a client is told of what went wrong between it and its replica."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BackPressureError):
        return ApiError(
            429, "all replicas are full, and as many requests wait as may: try again later",
            kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"},
        )  # fmt: skip
    if isinstance(error, RayActorError):
        return replica_error("the replica that made this answer has ended: try again")
    if isinstance(error, DeploymentUnavailableError):
        return replica_error("no replica can start; the server's log says why")
    logger.error("a replica failed", exc_info=error)
    return of_server("the server failed; its log says why")


def replica_error(message: str) -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="replica_lost", headers={"retry-after": "1"}
    )


class Together:
    """The metrics of the front and of all replicas; a replica's have a label with its number."""

    def __init__(self, front: str, replicas: list[tuple[str, str]]):
        self.front, self.replicas = front, replicas

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(self.front):
            if family.name.startswith(HTTP_REQUESTS):
                families[family.name] = family
        for number, text in self.replicas:
            for family in text_string_to_metric_families(text):
                if not family.name.startswith(HTTP_REQUESTS):
                    known = families.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for one in family.samples:
                        known.add_sample(one.name, {**one.labels, "replica": number}, one.value)
        replicas = Metric("flashcell_replicas", "replicas that answer", "gauge")
        replicas.add_sample("flashcell_replicas", {}, len(self.replicas))
        yield from [replicas, *families.values()]


def running_replicas() -> int:
    """Returns how many replicas Ray Serve says are running."""
    application = serve.status().applications.get(APPLICATION)
    deployment = application and application.deployments.get(DEPLOYMENT)
    return deployment.replica_states.get("RUNNING", 0) if deployment else 0


def make_front(front: Front) -> Any:
    """Returns the ASGI application."""
    app = plain_app()
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, front.answer, methods=["POST"], response_model=None)
    for path in ("/v1/models", "/v1/models/{name:path}"):
        app.add_api_route(path, front.answer, methods=["GET"], response_model=None)

    @app.get("/health")
    async def health() -> Response:
        count = await asyncio.to_thread(running_replicas)
        if not count:
            raise replica_error("no replica is running")
        return JSONResponse({"status": "ok", "replicas": count})

    @app.get("/metrics")
    async def metrics() -> Response:
        both = Together(front.metrics.text().decode(), await front.replica_metrics())
        text = generate_latest(both)  # type: ignore[arg-type]
        return Response(text, media_type="text/plain; version=0.0.4")

    return Door(app, front.metrics, front.key, front.hosts)
