"""Limits of request bodies: size, rate, and bytes of all requests together."""

import asyncio
from collections import Counter
from collections.abc import Container, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Final

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.body_budget import BodyBudget
from app.http.client import Client, client_in
from app.http.errors.rejections import (
    BodyTooLarge,
    BodyTooSlow,
    QueueFull,
    QuotaExceeded,
    Rejection,
)
from app.http.errors.responses import CountRejection, error_response, ignore_rejection

# The limit for all bodies together, in bodies of the maximum size: few have images.
_MAX_BODIES: Final = 16
# Streamed bodies of one client at a time: each takes a connection, and a file, for as long as it comes.
MAX_STREAMED: Final = 8

# The average bytes a second of a body that may take longer than its timeout: less than connections have
# over which files are sent, and too much for holding many connections at no cost.
LEAST_RATE: float = 16 * 1024
# Seconds after the deadline for what has arrived, and was not read since the event loop was late: in each
# turn it reads before it looks at timers, so that they are enough however late it is.
_MOMENT: Final = 0.001

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
        self._begun = monotonic()
        lengths = _values(scope["headers"], b"content-length")
        self.num_declared = max(map(_number, lengths), default=0)
        self.num_read = 0
        is_chunked = bool(_values(scope["headers"], b"transfer-encoding"))
        self.is_open = is_chunked or self.num_declared > 0
        self.client_disconnected = False

    async def receive(self) -> Message:
        """Wait for the next message."""
        return self._counted(await self._receive())

    async def receive_in_time(self, grace: float) -> Message:
        """Wait for the next message of a body that must come at LEAST_RATE after `grace` seconds.

        That is the average over the whole body: with a limit between two chunks, a byte now and then would
        hold a connection for ever.  How late the event loop is does not count: what has arrived is received.

        Raises:
            BodyTooSlow: nothing more has arrived in time.
        """
        if not self.is_open:
            return await self.receive()
        deadline = self._begun + grace + self.num_read / LEAST_RATE
        receiving = asyncio.ensure_future(self._receive())
        try:
            for seconds in (deadline - monotonic(), _MOMENT):
                done, _ = await asyncio.wait([receiving], timeout=seconds)
                if done:
                    return self._counted(receiving.result())
        finally:
            receiving.cancel()
        raise BodyTooSlow(grace, LEAST_RATE)

    def _counted(self, message: Message) -> Message:
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
                await body.receive()


class BodyLimit:
    """Reads each request body before it calls the app, and rejects bodies beyond the limits.

    The app receives the body as one message, and after that the disconnect.  On a few paths
    (`streamed`) the app receives the body as it arrives and limits its size; of these a client may
    send a few at a time.  `Authentication` comes first: every body has a client.

    budget: the bytes of all bodies that are being read or whose requests are in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout: float,
        count_rejection: CountRejection = ignore_rejection,
        *,
        streamed: Container[str] = (),
        num_clients: int = 1,
    ) -> None:
        """Limit the bodies of all requests.

        max_bytes: the largest body; several of that size may be buffered at a time.
        timeout: seconds within which a body must arrive, or come at LEAST_RATE.
        streamed: paths whose bodies are not read here.
        num_clients: how many there can be, each of which has a share of the budget.
        """
        self._app = app
        self._streamed = streamed
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._count_rejection = count_rejection
        self._num_streamed: Counter[Client] = Counter()
        self.budget = BodyBudget(_MAX_BODIES * max_bytes, num_clients)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (body := RequestBody(scope, receive)).is_open:
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._streamed:
            rejection = await self._stream(body, scope, send)
        elif body.num_declared > self._max_bytes:
            rejection = BodyTooLarge(self._max_bytes)
        else:
            rejection = await self._serve(body, scope, receive, send)
        if rejection is not None:
            response = error_response(rejection, scope, self._count_rejection)
            await send_rejection(response, body, send)

    async def _stream(self, body: RequestBody, scope: Scope, send: Send) -> Rejection | None:
        """Call the app with a body that it reads itself; return why it was not called."""
        client = client_in(scope)
        if self._num_streamed[client] >= MAX_STREAMED:
            limit = f"this API key has {MAX_STREAMED} uploads in flight, the limit"
            return QuotaExceeded(limit, retry_after=1)
        self._num_streamed[client] += 1
        try:
            receive = partial(body.receive_in_time, self._timeout)
            await self._app(scope, receive, _lingering(body, send))
            return None
        finally:
            self._num_streamed[client] -= 1

    async def _serve(
        self, body: RequestBody, scope: Scope, receive: Receive, send: Send
    ) -> Rejection | None:
        """Call the app; return why it was not called, after the buffered bytes are released."""
        client = client_in(scope)
        try:
            content = await self._read(body, client)
            if isinstance(content, Rejection):
                return content
            if content is not None:
                await self._app(scope, _replayed(content, receive), send)
            return None
        finally:
            self.budget.release(client, body.num_read)

    async def _read(self, body: RequestBody, client: Client) -> bytes | Rejection | None:
        """Return the content, or why it is rejected, or None if the client disconnected."""
        content = bytearray()
        while body.is_open:
            try:
                message = await body.receive_in_time(self._timeout)
            except BodyTooSlow as rejection:
                return rejection
            chunk = message.get("body", b"")
            self.budget.hold(client, len(chunk))
            if body.num_read > self._max_bytes:
                return BodyTooLarge(self._max_bytes)
            if self.budget.exceeds(client):
                return QueueFull("too many request bodies are being read", retry_after=1)
            content += chunk
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
