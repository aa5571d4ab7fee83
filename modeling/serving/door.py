"""What every request passes: the Host header, the key, and a count of the answers."""

import hmac
import ipaddress
from typing import Any

from fastapi.responses import Response

from .errors import ApiError
from .metrics import Metrics

OPEN = {"/", "/health"}  # what needs no key
PATHS = {
    "/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions",
}  # fmt: skip


class Door:
    """Checks the Host header and the key of every request, and counts the answers."""

    def __init__(self, app: Any, metrics: Metrics, key: str | None, hosts: set[str] | None):
        self.app, self.metrics, self.key = app, metrics, key
        self.hosts = hosts  # names that this server is called by; None for any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        scope["flashcell.send"] = send  # for streams: without the calls of every layer between
        error = self._refusal(scope)
        app = self.app if error is None else response_of(error)
        await app(scope, receive, count)

    def _refusal(self, scope: Any) -> ApiError | None:
        headers = dict(scope["headers"])
        if self.hosts is not None:
            host = host_name(headers.get(b"host", b"").decode("latin-1"))
            if host not in self.hosts:  # a name that another site made point here
                return ApiError(421, f"this server is not {host!r:.60}: see --allow-host")
        if self.key is not None and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            wanted = b"Bearer " + self.key.encode()
            if not hmac.compare_digest(given, wanted):
                return ApiError(
                    401, "the key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key", headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
        return None


def host_name(header: str) -> str:
    """Returns the host of a Host header, without its port."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()


def allowed_hosts(host: str, more: list[str]) -> set[str] | None:
    """Returns the names that a server bound to `host` is called by: None (any) unless loopback."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not more:
        return None
    return {"localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in more)}


def response_of(error: ApiError) -> Response:
    # With these the rest of the body has not been read, and nothing good may follow it.
    close = {"connection": "close"} if error.status in (401, 408, 413, 415, 421) else {}
    headers = {**error.headers, **close}
    return Response(error.content(), error.status, headers, "application/json")
