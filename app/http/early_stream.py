"""The beginning of a streamed response before its handler has one: clients give up on a silent connection."""

from typing import Final

from fastapi import Request
from starlette.types import Message, Scope, Send

_KEY: Final = "early_stream"
# As of the streams that follow.
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class EarlyStream:
    """Sends a response, whose beginning `comment` may have sent before the handler returns it.

    The stream of the handler then continues the one that has begun; any other response of it, which says
    why there is none, becomes an event of the type `error`.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._has_begun = False
        # The body of a response that is no stream; None while a stream is sent.
        self._body: bytes | None = None
        scope["state"][_KEY] = self

    async def comment(self, text: str) -> None:
        """Send a comment, and what comes before it in a stream."""
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
        await self._send(_body(f": {text}\n\n".encode(), more=True))

    async def send(self, message: Message) -> None:
        """Send a message of the handler's response."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
            self._body = None if is_stream else b""
        elif self._body is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                event = b"event: error\ndata: " + self._body.replace(b"\n", b" ") + b"\n\n"
                await self._send(_body(event, more=False))


def early_stream(request: Request) -> EarlyStream:
    stream: EarlyStream = request.scope["state"][_KEY]
    return stream


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
