"""One budget for the large bodies of all connections that their clients have not read yet."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final, TypeVar

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.worker_threads import WorkerThreads

T = TypeVar("T")

_MAX_BYTES: Final = 256 << 20
# A body is sent in pieces of this size, or in so many if it is longer: no connection buffers more than one.
_PIECE_BYTES: Final = 64 << 10
_NUM_PIECES: Final = 64
# Seconds that a client has for each piece while others wait for room, so about a minute for any body.
_PATIENCE: Final = 1.0
# The bodies that are being written are beyond the limit.
_MAX_WRITERS: Final = 2


@dataclass(eq=False, slots=True)
class _Sending:
    """A body that is being sent; `progress_at` is when its client took the last piece, or when it began."""

    abort: Callable[[], None]
    progress_at: float


class UnsentBytes:
    """The large bodies that are being sent, and a limit for all of them together.

    Beyond the limit no further one is written, and the connection whose client has taken no piece for longest
    is aborted after a second.  So a client waits for others that read, and never for those that do not.
    Bodies of one piece at most do not count.

    num_bytes: the bytes of all these bodies, each until its client has taken the whole.
    """

    def __init__(
        self,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = monotonic,
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._patience = patience
        # The one that stands still for longest is the first.
        self._sendings: dict[_Sending, None] = {}
        self._sent = asyncio.Event()
        self._writers = anyio.CapacityLimiter(_MAX_WRITERS)
        self._threads = WorkerThreads(_MAX_WRITERS)
        # These do not wait for large ones.
        self._threads_of_small = WorkerThreads(_MAX_WRITERS)
        self.num_bytes = 0

    async def write(self, write: Callable[[], T], num_bytes: int | None = None) -> T:
        """Write a body in a worker thread; a large one once there is room, and only a few at a time.

        num_bytes: about how large it is; None if that is not known before.
        """
        if num_bytes is not None and num_bytes <= _PIECE_BYTES:
            return await self._threads_of_small.run(write)
        async with self._writers:
            while self.num_bytes >= self._max_bytes:
                await self._wait_for_room()
            return await self._threads.run(write)

    def in_pieces(self, app: ASGIApp, abort: Callable[[], None]) -> ASGIApp:
        """Return the app of one connection, whose large bodies are counted and sent in pieces.

        abort: ends the connection at once.
        """

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, _PiecewiseSend(self, abort, send))

        return serve

    @contextmanager
    def counting(self, num_bytes: int, abort: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Count a body while the block sends it, which calls what this yields after each piece."""
        sending = _Sending(abort, self._clock())

        def progress() -> None:
            del self._sendings[sending]
            self._sendings[sending] = None
            sending.progress_at = self._clock()

        self._sendings[sending] = None
        self.num_bytes += num_bytes
        try:
            yield progress
        finally:
            del self._sendings[sending]
            self.num_bytes -= num_bytes
            sent, self._sent = self._sent, asyncio.Event()
            sent.set()

    async def _wait_for_room(self) -> None:
        """Wait until a body is sent or its client may have no more time; one that has none is aborted."""
        slowest = next(iter(self._sendings))
        time_left = slowest.progress_at + self._patience - self._clock()
        if time_left <= 0:
            slowest.abort()
        with anyio.move_on_after(time_left if time_left > 0 else self._patience):
            await self._sent.wait()


class _PiecewiseSend:
    """Sends the messages of one response.

    The head of a large body waits for it: where the response before is not read yet, sending a head already
    waits for the client, and the body would not be counted meanwhile.
    """

    def __init__(self, unsent: UnsentBytes, abort: Callable[[], None], send: Send) -> None:
        self._unsent = unsent
        self._abort = abort
        self._send = send
        self._head: Message | None = None
        # The keep-alive events of a stream come from another task.
        self._lock = asyncio.Lock()

    async def __call__(self, message: Message) -> None:
        async with self._lock:
            await self._send_whole(message)

    async def _send_whole(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if message["type"] == "http.response.start" and _has_large_body(message):
            self._head = message
        elif len(body) > _PIECE_BYTES:
            with self._unsent.counting(len(body), self._abort) as progress:
                await self._send_head()
                await self._send_pieces(body, progress)
                # It waits until the last piece is taken.
                await self._send({**message, "body": b""})
        else:
            await self._send_head()
            await self._send(message)

    async def _send_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            await self._send(head)

    async def _send_pieces(self, body: bytes, progress: Callable[[], None]) -> None:
        size = max(_PIECE_BYTES, -(-len(body) // _NUM_PIECES))
        for start in range(0, len(body), size):
            piece = body[start : start + size]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            progress()


def _has_large_body(head: Message) -> bool:
    lengths = [value for name, value in head.get("headers", ()) if name == b"content-length"]
    return any(int(length) > _PIECE_BYTES for length in lengths)
