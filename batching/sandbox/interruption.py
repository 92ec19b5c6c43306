"""Ends the wait of a blocking function whose caller has given up.

A thread cannot be cancelled.  But what takes long there is mostly a wait for another process, which ends
when the process is killed: the function says how (`interruptible`), and who gives up says when
(`Interruption.interrupt`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Final, TypeVar


class Interrupted(Exception):
    """The caller has given up, and gets no result."""


T = TypeVar("T")

# The interruption of the function that runs in this context; without one no caller gives up.
_CURRENT: Final[ContextVar["Interruption"]] = ContextVar("interruption")


class Interruption:
    """Whether the caller of a blocking function has given up; both threads use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_interrupted = False
        self._end: Callable[[], None] | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call a function, whose waits `interrupt` ends."""
        token = _CURRENT.set(self)
        try:
            return function()
        finally:
            _CURRENT.reset(token)

    def interrupt(self) -> None:
        """End the wait that is in progress, and every later one; it does not block."""
        with self._lock:
            self._is_interrupted = True
            if self._end is not None:
                self._end()

    def check(self) -> None:
        """Raise Interrupted if the caller has given up."""
        if self._is_interrupted:
            raise Interrupted

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the caller gives up while the block runs; see `interruptible`."""
        with self._lock:
            self.check()
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None
            self.check()


@contextmanager
def interruptible(end: Callable[[], None]) -> Iterator[None]:
    """Have `end` called, in another thread, if the caller of this function gives up meanwhile.

    Raises:
        Interrupted: it has given up, before the block or while it ran, whatever the block raised.
    """
    if (interruption := _CURRENT.get(None)) is None:
        yield
        return
    with interruption.ending(end):
        yield
