"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, with an HTTP status."""

import json
from typing import Any


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error", headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind, self.headers = kind, headers or {}

    def content(self) -> bytes:
        """Returns JSON in ASCII: a client may have sent half of a surrogate pair."""
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": said}).encode()


class ClientGone(Exception):
    """The client has closed its connection: nobody waits for the answer."""


def wrong(param: str, was: Any, must: str, code: str = "invalid_value") -> ApiError:
    """Returns the error of an argument that is not what it must be."""
    return ApiError(400, f"{param} is {shown(was)}, but must be {must}", param=param, code=code)


def shown(value: Any) -> str:
    """Returns a value as JSON, cut to a length that a message can have."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def of_server(message: str, status: int = 500) -> ApiError:
    return ApiError(status, message, kind="server_error")
