"""Request bodies: how large, how slow and how many at once they may be."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors import error_response
from app.http.rejections import BodyTooLarge, BodyTooSlow, QueueFull, Rejection

# The bodies of all requests together, in bodies of the largest size.
_MAX_BODIES: Final = 64

# A connection that is closed over unread bytes is reset, and the reset can overtake the answer.
# So what a refused client still sends is read and dropped, for so many seconds and bytes.
LINGER_SECONDS: float = 2.0
LINGER_BYTES: int = 64 << 20

# h11 refuses longer numbers, and Python does not convert those of some thousands of digits.
_MAX_DIGITS: Final = 20


class RequestBody:
    """The body of one request, on its way.

    num_declared: bytes that the head says will come; 1 where that is no number.
    num_read: bytes that have come.
    is_open: whether there may be more.
    is_lost: whether the client left before the end.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        lengths = _values(scope["headers"], b"content-length")
        self.num_declared = max(map(_number, lengths), default=0)
        self.num_read = 0
        is_chunked = bool(_values(scope["headers"], b"transfer-encoding"))
        self.is_open = is_chunked or self.num_declared > 0
        self.is_lost = False

    async def next_chunk(self) -> bytes:
        """Wait for more; nothing comes with the end and from a client that left."""
        message = await self._receive()
        self.is_open = message.get("more_body", False)
        self.is_lost = message["type"] == "http.disconnect"
        chunk: bytes = message.get("body", b"")
        self.num_read += len(chunk)
        return chunk


def _values(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else 1


async def send_rejection(refusal: Rejection, upload: RequestBody, send: Send) -> None:
    """Answer without the app; if the body has not come whole, close the connection."""
    response = error_response(refusal)
    if upload.is_open:
        response.headers["Connection"] = "close"
    start: Message = {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": response.raw_headers,
    }
    await send(start)
    # That is the whole answer for the client, which knows its length; for the server the end
    # is to come, and closes.
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _drop_rest(upload)
    await send({"type": "http.response.body"})


async def _drop_rest(upload: RequestBody) -> None:
    limit = upload.num_read + LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while upload.is_open and upload.num_read < limit:
                await upload.next_chunk()


class BodyLimit:
    """Reads each body before the app sees the request, and refuses what is too much.

    The app gets the body in one piece; what it receives after that is that the client has gone.

    num_held: bytes of all bodies that are on their way or being answered.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout
        self.num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (upload := RequestBody(scope, receive)).is_open:
            await self._app(scope, receive, send)
            return
        refusal: Rejection | None = BodyTooLarge(self._max_bytes)
        if upload.num_declared <= self._max_bytes:
            refusal = await self._serve(upload, scope, receive, send)
        if refusal is not None:
            await send_rejection(refusal, upload, send)

    async def _serve(
        self, upload: RequestBody, scope: Scope, receive: Receive, send: Send
    ) -> Rejection | None:
        """Call the app; return why it is not called, once the bytes are given back."""
        try:
            body = await self._read(upload)
            if isinstance(body, Rejection):
                return body
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
            return None
        finally:
            self.num_held -= upload.num_read

    async def _read(self, upload: RequestBody) -> bytes | Rejection | None:
        """Return the body, or why it is not taken, or None if the client has gone."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while upload.is_open:
                    chunk = await upload.next_chunk()
                    self.num_held += len(chunk)
                    if upload.num_read > self._max_bytes:
                        return BodyTooLarge(self._max_bytes)
                    if self.num_held > _MAX_BODIES * self._max_bytes:
                        return QueueFull("too many request bodies are being read", retry_after=1)
                    body += chunk
        except TimeoutError:
            return BodyTooSlow(self._timeout)
        return None if upload.is_lost else bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
