"""Calls the app as a request from a network would, from within the server."""

import asyncio
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message

from app.http.client import Client

_VERSIONS: Final = {"version": "3.0", "spec_version": "2.3"}


class InnerResponse(NamedTuple):
    status: int
    body: bytes


async def post_json(
    app: ASGIApp, path: str, body: bytes, client: Client, request_id: str
) -> InnerResponse:
    """Send a body to a path, as a client whose key needs no check; return the whole response."""
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
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        "state": {"client": client},
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    chunks: list[bytes] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # This client never disconnects; a task that is cancelled ends the wait.
        disconnect: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await disconnect

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return InnerResponse(status, b"".join(chunks))
