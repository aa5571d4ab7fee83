"""Connections with bounds: how many, how long and how large a request's head is, how slow a reader.

uvicorn waits for ever for the end of a request's head, and keeps all of it.
"""

import asyncio
import logging
import select
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError, of_server

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol. `limited` makes a class of it with other bounds."""

    MOST = 2048  # connections at a time
    HEAD_BYTES = 32_768
    SEND_BYTES = 131_072  # that the kernel keeps for a reader
    HEAD_SECONDS = 20.0  # for the head of a request, from its first byte or the connection's begin
    STALLED_SECONDS = 120.0  # after which a client that reads nothing is given up
    LOOK_SECONDS = 1.0  # after which an unread connection is looked at for its end

    _look: asyncio.TimerHandle | None = None
    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _in_head, _head_bytes = True, 0

    def connection_made(self, transport: Any) -> None:
        self._earlier: list[Any] = []  # requests without a whole answer, before the last one
        super().connection_made(transport)
        if len(self.connections) > self.MOST:
            self._refuse(of_server(f"there are {self.MOST} connections, which is the most", 503))
            return
        # The kernel's own buffers would take megabytes that nobody reads.
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, self.SEND_BYTES
        )
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled, self._look):
            if timer is not None:
                timer.cancel()
        for cycle in self._earlier:  # uvicorn does this for the last request
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head is None:
                self._watch_head()
            if self._head_bytes > self.HEAD_BYTES + 2**18:  # a single read may hold a body too
                self._refuse_head()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._head is None:
            self._watch_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.HEAD_BYTES + 2**18:
            raise ValueError("the head of a request is too large")

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.HEAD_BYTES:
            raise ValueError("the head of a request is too large")
        names = [name for name, _ in self.headers]
        for name in (b"host", b"content-length", b"content-type", b"authorization"):
            if names.count(name) > 1:
                raise ValueError(f"the header {name.decode()} is there twice")
        self._in_head, self._head_bytes = False, 0
        if self._head is not None:
            self._head.cancel()
            self._head = None
        before = self.cycle
        super().on_headers_complete()
        if before is not None and before is not self.cycle and not before.response_complete:
            self._earlier.append(before)
            if self._look is None:
                self._look_for_end()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.STALLED_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not HTTP, or its head is too large or unclear"))

    def _watch_head(self) -> None:
        self._head = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._watch_head()  # the next request waits for the answer to this one
        elif self._in_head and not self.transport.is_closing():
            self._refuse(ApiError(408, f"the head took more than {self.HEAD_SECONDS:g} s"))

    def _refuse_head(self) -> None:
        self._refuse(ApiError(431, f"the head has more than {self.HEAD_BYTES} bytes"))

    def _refuse(self, error: ApiError) -> None:
        content = error.content()
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(head.encode() + content)  # else it would be part of an answer
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _look_for_end(self) -> None:
        """Ends the connection if the client has closed it: while a request waits for the answer to an
        earlier one, uvicorn does not read, and would not see it."""
        self._look = None
        self._earlier = [cycle for cycle in self._earlier if not cycle.response_complete]
        if not self._earlier:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(self.LOOK_SECONDS, self._look_for_end)

    def _give_up(self) -> None:
        logger.info("a client has read nothing for %g s", self.STALLED_SECONDS)
        self.transport.abort()


def limited(**bounds: Any) -> type[Connection]:
    return type("Connection", (Connection,), bounds)
