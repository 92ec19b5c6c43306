"""The events of a response that is generated in the background, for clients that come and go."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

# Frames are read in pieces of about this size.
_PIECE_BYTES: Final = 64 << 10
_END: Final = b"\n\n"


class EventLog:
    """Frames of server-sent events; the first one has the number 0.

    Any number of clients follow it, each from where it was cut off and at its own pace.
    """

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._num_published = 0
        self._is_closed = False
        self._grown = asyncio.Event()

    @classmethod
    def unpacked(cls, packed: bytes) -> "EventLog":
        """Return the closed log that was packed; blocking."""
        log = cls()
        log._frames = [frame + _END for frame in zlib.decompress(packed).split(_END)[:-1]]
        log.close()
        return log

    def packed(self) -> bytes:
        """Return all frames in compressed form; blocking."""
        return zlib.compress(b"".join(self._frames))

    def append(self, frames: Iterable[bytes]) -> None:
        """Add frames, which followers see once they are published."""
        self._frames += frames

    def drop_unpublished(self) -> None:
        """Forget frames that no follower has seen."""
        del self._frames[self._num_published :]

    def publish(self) -> None:
        self._num_published = len(self._frames)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def close(self) -> None:
        """Publish what there is; nothing follows."""
        self._is_closed = True
        self.publish()

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """Yield the frames from a number on, several together, until the log is closed."""
        while True:
            grown, size, end = self._grown, 0, start
            while end < self._num_published and size < _PIECE_BYTES:
                size += len(self._frames[end])
                end += 1
            if end > start:
                yield b"".join(self._frames[start:end])
                start = end
            elif self._is_closed:
                return
            else:
                await grown.wait()
