"""Calls the app as a request from a network would, from within the server."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp, Message, Send

from app.http.client import Client

_VERSIONS: Final = {"version": "3.0", "spec_version": "2.3"}


class InnerResponse(NamedTuple):
    status: int
    body: bytes


async def post_json(
    app: ASGIApp, path: str, body: bytes, client: Client, request_id: str
) -> InnerResponse:
    """Send a body to a path, as a client whose key needs no check; return the whole response."""
    status = 0
    chunks: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    headers = [(b"x-request-id", request_id.encode())]
    await post(app, path, body, send, headers=headers, state={"client": client})
    return InnerResponse(status, b"".join(chunks))


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    send: Send,
    *,
    headers: Iterable[tuple[bytes, bytes]],
    state: dict[str, Any],
) -> None:
    """Send a body of JSON to a path, and the messages of the response to `send`."""
    lengths = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": _VERSIONS,
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, *lengths],
        "client": None,
        "server": None,
        "state": state,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # This client never disconnects; a task that is cancelled ends the wait.
        disconnect: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await disconnect

    await app(scope, receive, send)
