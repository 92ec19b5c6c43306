"""Measures how many requests the server finishes per second, for `Retry-After`."""

import math
from collections import deque
from typing import Final

# Seconds, and requests, that the measurement looks back.
_WINDOW: Final = 60.0
_MAX_ENDS: Final = 256

MAX_RETRY_AFTER: Final = 120


class ServiceRate:
    """Counts the requests that ended since the server last had nothing to do.

    max_num_seqs: requests that are served at once.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._busy_since = 0.0
        self._last_dropped = -math.inf

    def begin(self, now: float) -> None:
        """Record that the server has work from now on."""
        self._ends.clear()
        self._busy_since = now

    def record_end(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, num_requests: float, now: float) -> int:
        """Return how long `num_requests` requests take, in whole seconds from 1 to 120."""
        while self._ends and self._ends[0] < now - _WINDOW:
            self._last_dropped = self._ends.popleft()
        seconds = num_requests * self._seconds_per_request(now)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds)))

    def _seconds_per_request(self, now: float) -> float:
        if not self._ends:
            # None has ended yet, or lately: as if all that run ended now.
            return (now - max(self._busy_since, self._last_dropped)) / self._max_num_seqs
        # A full window begins with its first end, and not with the first moment looked at.
        is_full = len(self._ends) == _MAX_ENDS
        since = self._ends[0] if is_full else max(self._busy_since, now - _WINDOW)
        return max(now - since, 1e-3) / len(self._ends)
