"""Hubs that are broken or hostile: each answers every connection wrongly in its own way."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

DEADLINE = 60.0  # seconds after which even these end


def hang(connection: socket.socket) -> None:
    time.sleep(DEADLINE)


def close(connection: socket.socket) -> None:
    connection.recv(9999)


def garbage(connection: socket.socket) -> None:
    connection.recv(9999)
    connection.sendall(b"\0" * 9999)


def answer(head: bytes, body: bytes = b"") -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        while connection.recv(9999):
            length = b"Content-Length: %d\r\n\r\n" % len(body)
            connection.sendall(b"HTTP/1.1 " + head + b"\r\n" + length + body)

    return behave


def drip(head: bytes, content: bytes, pause: float) -> Callable[[socket.socket], None]:
    """Sends the head at once, then the content again and again with a pause after each."""

    def behave(connection: socket.socket) -> None:
        connection.recv(9999)
        connection.sendall(b"HTTP/1.1 " + head)
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            connection.sendall(content)
            time.sleep(pause)

    return behave


def behaviours(revision: str) -> dict[str, Callable[[socket.socket], None]]:
    pinned = b"\r\nX-Repo-Commit: " + revision.encode()
    whole = b"200 OK\r\nContent-Length: 99999999999" + pinned + b"\r\n\r\n"
    return {
        "hangs": hang,
        "closes": close,
        "sends garbage": garbage,
        "answers 500": answer(b"500 Oops"),
        "answers 429": answer(b"429 Slow down\r\nRetry-After: 1"),
        "answers 429 for an hour": answer(b"429 Slow down\r\nRetry-After: 3600"),
        "redirects in a circle": answer(b"302 Found\r\nLocation: /again" + pinned),
        "redirects to a file": answer(b"302 Found\r\nLocation: file:///etc/passwd" + pinned),
        "is a hotel's login page": answer(b"200 OK", b"<html>"),
        "sends a byte a second": drip(whole, b"x", 1.0),
        "sends a byte of the header a second": drip(b"200 OK\r\nX: ", b"x", 1.0),
        "sends a header without end": drip(b"200 OK\r\nX: ", b"x" * 65536, 0.0),
        "sends bytes without end": drip(whole, b"x" * 65536, 0.0),
        "sends an error without end": drip(b"404 No\r\n\r\n", b"x" * 65536, 0.0),
        "redirects with a body without end": drip(
            b"302 Found\r\nLocation: /again" + pinned + b"\r\n\r\n", b"x" * 65536, 0.0
        ),
    }


@contextlib.contextmanager
def serve(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Starts such a Hub and returns its URL."""

    def handle(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            behave(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
