"""The most connections that are open at once: each takes memory and a file descriptor."""

import logging
import resource
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from app.http.errors.responses import CountRejection, ignore_rejection
from app.settings import env_name

logger = logging.getLogger(__name__)

TOO_MANY: Final = "too_many_connections"

# Refused connections that wait for their clients to read why.
_MAX_LINGERING: Final = 64
_SHARE_OF_LINGERING: Final = 8
# Seconds between two lines in the log.
_LOG_INTERVAL: Final = 10.0
# Each may have a file open beside itself, which it uploads or downloads.  Connections are accepted in bursts,
# before any of them is refused; the other half of the descriptors is for these, and for all the rest.
_SHARE: Final = 4
_UNLIMITED: Final = 1 << 21
_MAX_BACKLOG: Final = 2048
_SHARE_OF_BACKLOG: Final = 4


class Connection(Protocol):
    """A connection that can be closed while it is idle."""

    def shutdown(self) -> None: ...


class ConnectionLimit:
    """The open connections; those that are idle between two requests make room for new ones.

    A connection without a request yet is none of the idle ones: its request is probably on the way.
    """

    def __init__(
        self,
        max_connections: int,
        count_rejection: CountRejection = ignore_rejection,
        clock: Callable[[], float] = monotonic,
        *,
        max_lingering: int = _MAX_LINGERING,
    ) -> None:
        self._max = max_connections
        self._max_lingering = max_lingering
        self._count_rejection = count_rejection
        self._clock = clock
        self._open: set[Connection] = set()
        # In the order in which they became idle.
        self._idle: dict[Connection, None] = {}
        self._lingering: set[Connection] = set()
        self._num_unlogged = 0
        self._log_at = clock()

    def admit(self, connection: Connection) -> bool:
        """Return whether a new connection is served; the one that is idle for longest may be closed."""
        if len(self._open) >= self._max and self._idle:
            oldest = next(iter(self._idle))
            self.forget(oldest)
            oldest.shutdown()
        if len(self._open) < self._max:
            self._open.add(connection)
            return True
        self._count_rejection(TOO_MANY)
        self._log()
        return False

    def may_linger(self, connection: Connection) -> bool:
        """Return whether a refused connection may wait until its client has read the response."""
        if len(self._lingering) >= self._max_lingering:
            return False
        self._lingering.add(connection)
        return True

    def set_idle(self, connection: Connection, *, is_idle: bool) -> None:
        if is_idle:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Take notice that a connection is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._lingering.discard(connection)

    def _log(self) -> None:
        self._num_unlogged += 1
        if (now := self._clock()) >= self._log_at:
            line = "connections refused: %d, since %d are open (%s)"
            logger.warning(line, self._num_unlogged, len(self._open), env_name("max_connections"))
            self._num_unlogged, self._log_at = 0, now + _LOG_INTERVAL


def max_files() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def fitting_connections(wanted: int, num_files: int) -> int:
    """Return how many connections there may be, for which so many files leave room."""
    return max(1, min(wanted, num_files // _SHARE))


def fitting_lingering(num_files: int) -> int:
    """Return how many refused connections may wait for their clients."""
    return min(_MAX_LINGERING, num_files // _SHARE_OF_LINGERING)


def fitting_backlog(num_files: int) -> int:
    """Return how many connections may be accepted in one burst."""
    return max(1, min(_MAX_BACKLOG, num_files // _SHARE_OF_BACKLOG))
