"""Limits of request bodies: size, time, and bytes of all requests together."""

import asyncio
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Final

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors import CountRejection, error_response, ignore_rejection
from app.http.rejections import BodyTooLarge, BodyTooSlow, QueueFull, Rejection

# The limit for all bodies together, in bodies of the maximum size.
_MAX_BODIES: Final = 64

# Closing a connection with unread bytes resets it, and the reset can overtake the response.
# So the rest of a rejected body is read and dropped, up to these limits.
LINGER_SECONDS: float = 2.0
LINGER_BYTES: int = 64 << 20

# h11 rejects longer numbers, and Python does not convert numbers of thousands of digits.
_MAX_DIGITS: Final = 20


class RequestBody:
    """The body of one request while it is received.

    num_declared: bytes that the headers announce; 1 if the length is not a number.
    num_read: bytes received so far.
    is_open: whether more may come.
    client_disconnected: whether the client disconnected before the end.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        lengths = _values(scope["headers"], b"content-length")
        self.num_declared = max(map(_number, lengths), default=0)
        self.num_read = 0
        is_chunked = bool(_values(scope["headers"], b"transfer-encoding"))
        self.is_open = is_chunked or self.num_declared > 0
        self.client_disconnected = False

    async def next_chunk(self) -> bytes:
        """Wait for the next chunk; it is empty at the end and if the client disconnected."""
        chunk: bytes = (await self.receive()).get("body", b"")
        return chunk

    async def receive(self) -> Message:
        """Wait for the next message."""
        message = await self._receive()
        self.is_open = message.get("more_body", False)
        self.client_disconnected = message["type"] == "http.disconnect"
        self.num_read += len(message.get("body", b""))
        return message


def _values(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else 1


async def send_rejection(response: Response, body: RequestBody, send: Send) -> None:
    """Send a response without calling the app; close the connection if the body is incomplete."""
    if body.is_open:
        response.headers["Connection"] = "close"
    start: Message = {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": response.raw_headers,
    }
    await send(start)
    # The client knows the length, so this completes the response for it; the server waits for
    # the last message before it closes the connection.
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _drop_rest(body)
    await send({"type": "http.response.body"})


async def _drop_rest(body: RequestBody) -> None:
    limit = body.num_read + LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while body.is_open and body.num_read < limit:
                await body.next_chunk()


class BodyLimit:
    """Reads each request body before it calls the app, and rejects bodies beyond the limits.

    The app receives the body as one message, and after that the disconnect.  On a few paths
    (`streamed`) the app receives the body as it arrives and applies limits of its own.

    buffered_bytes: bytes of all bodies that are being read or whose requests are in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout: float,
        count_rejection: CountRejection = ignore_rejection,
        streamed: Container[str] = (),
    ) -> None:
        """Limit the bodies of all requests.

        max_bytes: of one body; several of that size may be buffered at a time.
        timeout: seconds within which a body must arrive.
        streamed: paths whose bodies are not read here.
        """
        self._app = app
        self._streamed = streamed
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._count_rejection = count_rejection
        self.buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (body := RequestBody(scope, receive)).is_open:
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._streamed:
            await self._app(scope, body.receive, _lingering(body, send))
            return
        rejection: Rejection | None = BodyTooLarge(self._max_bytes)
        if body.num_declared <= self._max_bytes:
            rejection = await self._serve(body, scope, receive, send)
        if rejection is not None:
            response = error_response(rejection, scope, self._count_rejection)
            await send_rejection(response, body, send)

    async def _serve(
        self, body: RequestBody, scope: Scope, receive: Receive, send: Send
    ) -> Rejection | None:
        """Call the app; return why it was not called, after the buffered bytes are released."""
        try:
            content = await self._read(body)
            if isinstance(content, Rejection):
                return content
            if content is not None:
                await self._app(scope, _replayed(content, receive), send)
            return None
        finally:
            self.buffered_bytes -= body.num_read

    async def _read(self, body: RequestBody) -> bytes | Rejection | None:
        """Return the content, or why it is rejected, or None if the client disconnected."""
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while body.is_open:
                    chunk = await body.next_chunk()
                    self.buffered_bytes += len(chunk)
                    if body.num_read > self._max_bytes:
                        return BodyTooLarge(self._max_bytes)
                    if self.buffered_bytes > _MAX_BODIES * self._max_bytes:
                        return QueueFull("too many request bodies are being read", retry_after=1)
                    content += chunk
        except TimeoutError:
            return BodyTooSlow(self._timeout)
        return None if body.client_disconnected else bytes(content)


def _lingering(body: RequestBody, send: Send) -> Send:
    """Return a `send` for a response that may come before the end of the body."""

    async def send_and_drop(message: Message) -> None:
        if not body.is_open:
            await send(message)
        elif message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            await send({**message, "headers": headers})
        else:
            await send({**message, "more_body": True})
            if not message.get("more_body", False):
                await _drop_rest(body)
                await send({"type": "http.response.body"})

    return send_and_drop


def _replayed(content: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
