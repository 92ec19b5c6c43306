"""Streams of server-sent events, and of lines of JSON."""

from collections.abc import AsyncIterator, Callable
from typing import Final, cast

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Message, Send

# Seconds.  Proxies and clients give up on a connection that is silent while a request waits.
PING_INTERVAL: Final = 10

LINES_TYPE: Final = "application/x-ndjson"

# sse-starlette cuts every running stream as soon as the process gets a signal; here they get
# time to finish (app/server/uvicorn_server.py).
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventStream(EventSourceResponse):
    """Streams events.

    Their source belongs to what the request holds (`app/http/request_lifetime.py`): if the client
    disconnects before the first event, the generator of events never starts and runs no `finally`; if the
    response is cancelled, no background task runs.
    """

    def __init__(
        self, events: AsyncIterator[bytes], new_ping: Callable[[], ServerSentEvent] | None = None
    ) -> None:
        """`events` are whole frames, with their blank lines.

        new_ping: the event that keeps a silent connection alive; None is a comment, which some
            clients ignore.
        """
        super().__init__(events, sep="\n", ping=PING_INTERVAL, ping_message_factory=new_ping)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send without the cancel scope for a `send_timeout`, of which there is none here."""
        await send(message)


class LineStream(EventStream):
    """Streams lines of JSON, as `events` are of `EventStream`.

    keep_alive: the line that is sent while there is no other; clients read each as a part of the response.
    """

    def __init__(self, lines: AsyncIterator[bytes], keep_alive: Callable[[], bytes]) -> None:
        # A line goes the way of an event: bytes are sent as they are.
        super().__init__(lines, cast(Callable[[], ServerSentEvent], keep_alive))
        self.headers["content-type"] = LINES_TYPE
