"""Tests what a replica does with a request, in this process and without Ray's."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason='replicas need pip install "flashcell[ray]"')

from flashcell.serving.replicas.replica import Replica


@pytest.mark.parametrize("deaf", [False, True], ids=["cancelled", "deaf to it"])
def test_an_application_learns_that_a_client_has_gone(deaf):
    """By a cancellation, or by what it receives if it has lost that."""
    ended = asyncio.Event()

    async def application(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert (await receive())["body"] == b"{}"
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if not deaf:
                ended.set()
                raise
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    async def run() -> None:
        replica = SimpleNamespace(door=application)
        answer = Replica.answer(replica, "POST", "/", [], b"{}", [])
        assert await anext(answer) == (200, [])
        assert await anext(answer) == b"a"
        await answer.aclose()
        await asyncio.wait_for(ended.wait(), 2)

    asyncio.run(run())
