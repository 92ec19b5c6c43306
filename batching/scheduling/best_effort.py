"""When best-effort requests, the lines of batches, take part in steps beside other requests."""

from typing import Final

# Seconds after which they take part in a step that others have work for: so seldom that one step in a
# hundred takes longer, and often enough that they end however long the others go on.
_INTERVAL: Final = 0.5
# Seconds after the last of other requests for which those are still expected: conversations have pauses,
# and a request waits for the steps that it finds.
QUIET_PERIOD: Final = 5.0


class BestEffortTurns:
    """Remembers when best-effort requests and other requests were last served.

    All times are in seconds on the same clock.
    """

    def __init__(self) -> None:
        self._served = 0.0
        self._others_served = -QUIET_PERIOD

    def is_due(self, now: float) -> bool:
        """Return whether best-effort requests take part in the next step even if others have work."""
        return now - self._served >= _INTERVAL

    def expects_others(self, now: float) -> bool:
        """Return whether another request may arrive soon, because one was served recently."""
        return now - self._others_served < QUIET_PERIOD

    def serve(self, now: float) -> None:
        """Record that best-effort requests take part in a step."""
        self._served = now

    def serve_others(self, now: float) -> None:
        """Record that other requests are present."""
        self._others_served = now
