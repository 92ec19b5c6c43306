"""How the link between the ranks has ended: decided once, for all threads."""

import threading
from collections.abc import Callable
from typing import Final

from batching.errors import RankLost

# Seconds within which the heartbeats see that a process or a connection is gone.
_SEEN_WITHIN: Final = 1.0


class Fate:
    """The end of a link; any thread may use it.

    error: why the link has ended; None while it has not.
    """

    def __init__(self, on_end: Callable[[RankLost], None]) -> None:
        """Call `on_end` with the reason, once, in the thread that finds it."""
        self.error: RankLost | None = None
        self._on_end = on_end
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def decide(self, error: RankLost) -> RankLost:
        """End the link for a reason, unless it has ended; return why it has."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
        try:
            self._on_end(error)
        finally:
            self._has_ended.set()
        return error

    def wait(self, seconds: float) -> RankLost | None:
        """Wait until it is decided and all know it, for so long at most; return the reason."""
        self._has_ended.wait(seconds)
        return self.error

    def check(self) -> None:
        """Find out whether the link has ended, where something has failed that needs it: that is seen within a second.

        Raises:
            RankLost: it has.
        """
        if (error := self.wait(_SEEN_WITHIN)) is not None:
            raise error.with_traceback(None)
