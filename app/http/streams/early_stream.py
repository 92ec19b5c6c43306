"""The beginning of a streamed response before its handler has one: clients give up on a silent connection."""

from collections.abc import Callable
from typing import Final, NamedTuple

from fastapi import Request
from starlette.types import Message, Scope, Send

_KEY: Final = "early_stream"


class StreamForm(NamedTuple):
    """How a stream is written.

    comment: returns what clients skip.
    error: returns what tells, from the body of another response, why nothing follows.
    """

    media_type: str
    comment: Callable[[str], bytes]
    error: Callable[[bytes], bytes]


def _error_event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body.replace(b"\n", b" ") + b"\n\n"


EVENTS: Final = StreamForm("text/event-stream", lambda text: f": {text}\n\n".encode(), _error_event)


class EarlyStream:
    """Sends a response, whose beginning `comment` may have sent before the handler returns it.

    The stream of the handler then continues the one that has begun; any other response of it, which says
    why there is none, becomes the error of the stream's form.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        # None until the stream has begun.
        self._form: StreamForm | None = None
        # The body of a response that is no stream; None while a stream is sent.
        self._body: bytes | None = None
        scope["state"][_KEY] = self

    async def comment(self, text: str, form: StreamForm = EVENTS) -> None:
        """Send a comment, and what comes before it in a stream."""
        if self._form is None:
            self._form = form
            # As of the streams that follow.
            headers = (
                (b"content-type", f"{form.media_type}; charset=utf-8".encode()),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            )
            await self._send({"type": "http.response.start", "status": 200, "headers": [*headers]})
        await self._send(_body(form.comment(text), more=True))

    async def send(self, message: Message) -> None:
        """Send a message of the handler's response."""
        if self._form is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            media_type = self._form.media_type.encode()
            is_stream = any(
                name == b"content-type" and value.startswith(media_type)
                for name, value in message["headers"]
            )
            self._body = None if is_stream else b""
        elif self._body is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send(_body(self._form.error(self._body), more=False))


def early_stream(request: Request) -> EarlyStream:
    stream: EarlyStream = request.scope["state"][_KEY]
    return stream


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
