"""Timers of connections."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timer:
    """Calls a function once after some seconds unless it is stopped before."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer; a running one continues."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()


class WriteTimeout:
    """Aborts a connection whose client reads nothing for some seconds while something is buffered for it.

    A slow client gets as long again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = Timer(loop, seconds, self._check)
        self._transport: asyncio.Transport | None = None
        self._num_unsent = 0

    def start(self, transport: asyncio.Transport) -> None:
        """Begin when writing is paused."""
        self._transport = transport
        self._num_unsent = transport.get_write_buffer_size()
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()

    def _check(self) -> None:
        assert self._transport is not None, "it was started"
        if self._transport.get_write_buffer_size() < self._num_unsent:
            self.start(self._transport)
        else:
            logger.debug("a connection is aborted: its client reads nothing")
            self._transport.abort()
