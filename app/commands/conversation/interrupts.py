"""Ctrl-C in a conversation: it ends what is waited for, and however often it is pressed, not the conversation."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Lets Ctrl-C raise KeyboardInterrupt once within `expected`, and ignores it otherwise.

    A second one would come while the first is handled, and end the program.
    """

    def __init__(self) -> None:
        self._is_expected = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signal; in the main thread."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Let one interrupt what runs within this."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        if self._is_expected:
            self._is_expected = False
            raise KeyboardInterrupt
