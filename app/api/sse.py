"""Streams of server-sent events, and of lines of JSON."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, cast

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Message, Receive, Scope, Send

from app.http.streams.late_head import LateHead, Opening

# Seconds.  Proxies and clients give up on a connection that is silent while a request waits.
PING_INTERVAL: Final = 10

LINES_TYPE: Final = "application/x-ndjson"

# sse-starlette cuts every running stream as soon as the process gets a signal; here they get
# time to finish (app/server/uvicorn_server.py).
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

# Returns the last frames of a stream that an exception ends.
Failed = Callable[[Exception], Awaitable[bytes]]


class EventStream(EventSourceResponse):
    """Streams events.

    The head waits for the first frame that is no `Opening`, for a keep-alive, or until it is due.  An exception
    before is raised, and gets its own status; one behind it becomes the last frames.

    Their source belongs to what the request holds (`app/http/request_lifetime.py`): if the client
    disconnects before the first event, the generator of events never starts and runs no `finally`; if the
    response is cancelled, no background task runs.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        new_ping: Callable[[], ServerSentEvent] | None = None,
        failed: Failed | None = None,
    ) -> None:
        """`events` are whole frames, with their blank lines.

        new_ping: the event that keeps a silent connection alive; None is a comment, which some
            clients ignore.
        failed: None lets an exception cut the stream.
        """
        self._failed = failed
        super().__init__(
            self._to_the_end(events),
            sep="\n",
            ping=PING_INTERVAL,
            ping_message_factory=new_ping,
            data_sender_callable=self._begin_in_time,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._head = LateHead(scope, send)
        await super().__call__(scope, receive, self._head.send)

    async def _to_the_end(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for frame in events:
                if not (isinstance(frame, Opening) and self._head.hold(frame)):
                    yield frame
        except Exception as error:
            if self._failed is None or not self._head.has_begun:
                raise
            yield await self._failed(error)

    async def _begin_in_time(self) -> None:
        await anyio.sleep(self._head.time_left)
        await self._head.begin()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send without the cancel scope for a `send_timeout`, of which there is none here."""
        await send(message)


class LineStream(EventStream):
    """Streams lines of JSON, as `events` are of `EventStream`.

    keep_alive: the line that is sent while there is no other; clients read each as a part of the response.
    """

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        keep_alive: Callable[[], bytes],
        failed: Failed | None = None,
    ) -> None:
        # A line goes the way of an event: bytes are sent as they are.
        super().__init__(lines, cast(Callable[[], ServerSentEvent], keep_alive), failed)
        self.headers["content-type"] = LINES_TYPE
