"""A replica: one model with its Batcher and its states, in a process of Ray's.

It runs the application of app.py. What a client sends reaches it through front.py, and what the
application answers goes back piece by piece.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from ray import serve

from ..app import Server, make_app
from ..door import Door
from ..engine import SWITCH_SECONDS
from .beginnings import Beginning

Piece = tuple[int, list[tuple[bytes, bytes]]] | bytes  # status and headers; then the body


class Replica:
    """What Ray Serve starts on a GPU or on some cores, as often as there shall be replicas."""

    door: Door | None = None

    async def __init__(  # type: ignore[misc]  # Ray Serve takes it
        self, make: Callable[[], Server], created: int, here_alone: bool
    ):
        if here_alone:
            keep_grpc_here()
        sys.setswitchinterval(SWITCH_SECONDS)
        self.server = await asyncio.to_thread(make)
        self.server.created = created
        self.server.key = self.server.hosts = None  # the front has checked both
        self.number = serve.get_replica_context().replica_id.unique_id
        self.door = make_app(self.server)
        self.lifespan = self.door.app.router.lifespan_context(self.door.app)
        await self.lifespan.__aenter__()

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes,
        beginnings: list[Beginning],
    ) -> AsyncIterator[Piece]:  # fmt: skip
        """Yields the application's answer to one request; `beginnings` is for the router.

        The caller ends it by cancelling: then what runs of the answer ends too."""
        begun, gone = False, asyncio.Event()
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if begun:
                await gone.wait()
                return {"type": "http.disconnect"}
            begun = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        assert self.door is not None
        task = asyncio.ensure_future(self.door(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            message = await sent.get()
            while message is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"]
                    message = await sent.get()
                    continue
                pieces = [message.get("body", b"")]
                while not sent.empty() and (message := sent.get_nowait()) is not None:
                    pieces.append(message.get("body", b""))
                if any(pieces):
                    yield b"".join(pieces)
                if message is not None:
                    message = await sent.get()
            await task  # raises what the application raised
        finally:
            gone.set()
            task.cancel()

    async def metrics(self) -> tuple[str, str]:
        """Returns the replica's number and its metrics, as text."""
        return self.number, self.server.metrics.text().decode()

    def check_health(self) -> None:
        """Raises if the replica cannot go on: Ray replaces it then."""
        if self.door is not None and self.server.engine.broken:
            raise RuntimeError(self.server.engine.broken)

    async def __del__(self) -> None:  # Ray calls it once, before the process ends
        if self.door is not None:
            await self.lifespan.__aexit__(None, None, None)


def keep_grpc_here() -> None:
    """Lets this process's gRPC servers listen on this machine alone.

    Ray Serve gives every replica one on all addresses of the machine, which takes Ray's key."""
    server = type(grpc.aio.server())
    add = server.add_insecure_port
    server.add_insecure_port = lambda self, address: add(
        self, f"127.0.0.1:{address.rpartition(':')[2]}"
    )
