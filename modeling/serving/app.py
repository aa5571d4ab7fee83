"""The HTTP application: routes, the key, limits, and errors in OpenAI's form."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..state.prefix_states import PrefixStates
from .answers import Writer
from .door import Door, response_of
from .engine import Answer, Choice, Engine
from .errors import ApiError, ClientGone, of_server
from .metrics import Metrics
from .protocol import Asked, Protocol
from .sampling import make_request
from .text import Text

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
SMALL = 4096  # bytes of a body that is checked on the event loop; larger ones in a thread
LARGE = 2**17  # bytes of a body that takes long to check
LARGE_AT_ONCE = 2  # so many are checked at a time, so that threads are left for smaller ones
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass
class Server:
    """All that the routes need."""

    name: str
    protocol: Protocol
    engine: Engine
    metrics: Metrics
    decode: Callable[[list[int]], str]
    token_bytes: Callable[[int], bytes | None]
    states: PrefixStates | None = None
    key: str | None = None
    hosts: set[str] | None = None  # names that a Host header may have; None for any
    body_seconds: float = 30.0  # for the body of a request
    created: int = field(default_factory=lambda: int(time.time()))
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE))

    async def answer(self, request: Request, read: Callable[[bytes], Asked]) -> Response:
        body = await read_body(request, self.protocol.limits.body_bytes, self.body_seconds)
        if len(body) > LARGE:
            async with self.large:
                if await request.is_disconnected():
                    raise ClientGone
                asked, choices = await asyncio.to_thread(self.prepare, read, body)
        elif len(body) > SMALL or (self.states is not None and self.states.folder is not None):
            asked, choices = await asyncio.to_thread(self.prepare, read, body)
        else:
            asked, choices = self.prepare(read, body)
        engine = self.engine
        if engine.broken:
            raise of_server(engine.broken, 503)
        if len(choices) > engine.free:
            raise ApiError(
                429, f"{engine.most - engine.free} choices run or wait, and at most {engine.most} "
                "may: try again later", kind="rate_limit_error", code="queue_full",
                headers={"retry-after": "1"},
            )  # fmt: skip
        answer = Answer(choices)
        own = self.decode, self.token_bytes
        writer = Writer(asked, answer, self.name, *own, engine.cancel)
        engine.submit(answer)
        if asked.stream:
            return EventStream(writer.chunks(), answer, self.finish)
        gone = asyncio.ensure_future(until_gone(request.receive, answer))
        try:
            return Response(await writer.whole(), media_type="application/json")
        finally:
            gone.cancel()
            self.finish(answer)

    def prepare(self, read: Callable[[bytes], Asked], body: bytes) -> tuple[Asked, list[Choice]]:
        """Checks a body, and makes its choices; runs in any thread."""
        asked = read(body)
        most, many = self.engine.most, asked.n * len(asked.prompts)
        if many > most:
            raise ApiError(400, f"there are {many} choices, but may be {most}", param="n")
        choices = list[Choice]()
        for prompt in asked.prompts:
            more: dict[str, Any] = {}
            if self.states is not None:
                state = self.states.find(prompt)
                begin = 0 if state is None else int(state.get_seq_length())
                more["past_key_values"] = state
                more["keep_at"] = self.states.cuts(prompt, begin)
                more["on_state"] = self.states.keep
            for number in range(asked.n):
                request = make_request(asked, prompt, number, **more)
                text = Text(self.decode, prompt, asked.stop)
                live = asked.stream or bool(asked.stop)
                choices.append(Choice(len(choices), request, text, live))
        return asked, choices

    def finish(self, answer: Answer) -> None:
        """Ends what still runs of an answer, and counts all of it."""
        self.engine.cancel(answer.choices)
        for choice in answer.choices:
            self.metrics.choice_ended(choice)


class EventStream(StreamingResponse):
    """Server-sent events, until the last one or until the client has gone."""

    def __init__(
        self, chunks: AsyncIterator[bytes], answer: Answer, finish: Callable[[Answer], None]
    ):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self.answer, self.finish = answer, finish

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(until_gone(receive, self.answer))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            directly = scope.get("flashcell.send", send)
            async for chunk in self.body_iterator:
                await directly({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientGone:
            pass
        finally:
            gone.cancel()
            self.finish(self.answer)


async def until_gone(receive: Any, answer: Answer) -> None:
    """Tells an answer when its client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.leave()


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Returns the body of a request, if it is JSON, not too large and not too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site could send others unasked
        raise ApiError(
            415, f"content-type is {kind or 'missing'!r:.60}, but must be application/json"
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "content-encoding must be left out")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise ApiError(413, f"the body has {length:.20} bytes, but may have {most}")
    try:
        # Not asyncio.wait_for, which before Python 3.12 can lose the cancellation of its caller.
        with anyio.fail_after(seconds):
            return await receive_all(request, most)
    except TimeoutError:
        raise ApiError(408, f"the body took more than {seconds:g} s") from None


async def receive_all(request: Request, most: int) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise ApiError(413, f"the body has more than {most} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


def plain_app(lifespan: Any = None) -> FastAPI:
    """Returns an application that has the page at / alone, and answers errors in OpenAI's form."""
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return response_of(error)

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path:.60}: {error.detail}"
        return response_of(ApiError(error.status_code, said, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return response_of(of_server("the server failed; its log says why"))

    @app.get("/")
    async def page() -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=SECURITY)

    return app


def make_app(server: Server) -> Any:
    """Returns the ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start(asyncio.get_running_loop())
        yield
        await server.engine.stop()
        if server.states is not None and server.states.folder is not None:
            await asyncio.to_thread(server.states.folder.close)

    app = plain_app(lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.answer(request, server.protocol.read_completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.answer(request, server.protocol.read_chat)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name not in server.protocol.names:
            raise ApiError(
                404, f"there is no model {name!r:.60}", param="model", code="model_not_found"
            )
        return model_card()

    def model_card() -> dict[str, Any]:
        return {
            "id": server.name, "object": "model", "created": server.created,
            "owned_by": "flashcell", "chat": server.protocol.can_chat,
        }  # fmt: skip

    @app.get("/health")
    async def health() -> Response:
        if server.engine.broken:
            raise of_server(server.engine.broken, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    return Door(app, server.metrics, server.key, server.hosts)
