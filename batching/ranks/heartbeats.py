"""Signs of life between rank 0 and each other rank, on connections and in a thread of their own.

A machine that has lost its power or its network says nothing more, and TCP alone would notice after minutes;
a process that was stopped goes on to take what it is sent.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from batching.errors import RankLost, RankRefused, RanksEnded, printable
from batching.ranks.fate import Fate

# Seconds between two signs of life, and of silence after which a rank counts as lost.
INTERVAL: Final = 1.0
TIMEOUT: Final = 5.0
# Seconds by which this process outlives what the others take for its death, if it does not even run this thread.
_GUARD_SECONDS: Final = 2.0
# Seconds for which the others may take to close their ends, so that they read what was said last.
_LINGER: Final = 1.0
_BEAT: Final = b".\n"
# What follows it are the seconds for which the others may be silent.
_SILENCE: Final = b"silence "
_MAX_LINE: Final = 4096
_WORDS: Final[Mapping[str, type[RankLost]]] = {
    "lost": RankLost,
    "refused": RankRefused,
    "ended": RanksEnded,
}


def line_of(error: RankLost) -> bytes:
    """Return the line that tells other ranks of the end."""
    word = next(word for word, kind in _WORDS.items() if type(error) is kind)
    return f"{word} {error.rank} {printable(error.reason)}\n".encode()


def error_of(line: bytes) -> RankLost | None:
    """Return the end that a line tells of; None if it is no such line."""
    try:
        word, rank, reason = line.decode().split(" ", 2)
        return _WORDS[word](int(rank), printable(reason))
    except (ValueError, KeyError):
        return None


# Ends this process unless it is called again within some seconds; None lets it live.  What blocks all threads of Python
# for longer, as a call of MLX does that connects ranks and keeps the interpreter's lock, has ended the rank for all others.
Guard = Callable[[float | None], None]


def no_guard(seconds: float | None) -> None:
    """Let a process go on that none of its threads runs in."""


@dataclass
class Peer:
    """The other end of a connection.

    name: of its host, for the operator.
    silence: seconds since it was last heard in which this process could have heard it.
    """

    rank: int
    name: str
    sock: socket.socket
    silence: float = 0.0
    unread: bytes = b""

    def lost(self, reason: str) -> RankLost:
        return RankLost(self.rank, f"({self.name}) {reason}")


class Heartbeats:
    """Says every second that this process lives, and finds who does not; the fate of the link has the answer.

    A process lives, too, if what it computes never ends, as a collective can: `limit` is for that.

    The thread that `start` starts owns all but `tell`, `allow_silence` and limits, which any thread may call.
    """

    def __init__(
        self,
        own: str,
        rank: int,
        peers: list[Peer],
        fate: Fate,
        guard: Guard = no_guard,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Own the connections of the peers.

        own, rank: the name of this process's host, and its number.
        clock: in seconds.
        """
        self._own, self._rank = own, rank
        self._peers, self._fate, self._guard, self._clock = peers, fate, guard, clock
        # Seconds that what this process does may take, and that it has taken.
        self._limit: float | None = None
        self._worked = 0.0
        self._timeout = TIMEOUT
        self._selector = selectors.DefaultSelector()
        for peer in peers:
            peer.sock.setblocking(False)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        # A byte ends the wait for the others.
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._turned = self._next_beat = clock()

    def start(self) -> None:
        self._thread.start()

    def allow_silence(self, seconds: float) -> None:
        """Let all ranks be silent for so long."""
        with self._lock:
            self._timeout = seconds
            for peer in self._peers:
                with suppress(OSError):
                    peer.sock.send(_SILENCE + f"{seconds}\n".encode())

    def limit(self, seconds: float | None) -> None:
        """Count this rank as lost if this is not called again within so many seconds; None is no limit."""
        with self._lock:
            # The next turn adds what was before, too.
            self._limit, self._worked = seconds, -INTERVAL

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Do not count the time within the block; the limit begins again behind it."""
        limit = self._limit
        self.limit(None)
        try:
            yield
        finally:
            self.limit(limit)

    def tell(self, error: RankLost) -> None:
        """Tell all peers of the end of the link, after which nothing is sent."""
        with self._lock:
            for peer in self._peers:
                with suppress(OSError):
                    peer.sock.send(line_of(error))
                with suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_WR)
            self._waker.send(b"\0")

    def close(self) -> None:
        """Wait until the peers have heard of the end, for a second at most, and close the connections."""
        self._thread.join()
        self._guard(None)
        self._selector.close()
        for sock in (self._woken, self._waker, *(peer.sock for peer in self._peers)):
            sock.close()

    def turn(self) -> None:
        """Read what has come, say that this process lives, and find who has been silent for too long."""
        for key, _ in self._selector.select(0):
            if isinstance(key.data, Peer):
                self._read(key.data)
        self._guard(self._timeout + _GUARD_SECONDS)
        now = self._clock()
        # In what is longer this thread, and maybe the process, did not run.
        passed, self._turned = min(now - self._turned, INTERVAL), now
        if now >= self._next_beat:
            self._next_beat = now + INTERVAL
            self._beat()
        for peer in self._peers:
            peer.silence += passed
            if peer.silence > self._timeout:
                self._fate.decide(peer.lost(f"has not answered for {self._timeout:.0f} s"))
        with self._lock:
            self._worked += passed
            limit = self._limit
            is_over = limit is not None and self._worked > limit
        if is_over:
            reason = f"({self._own}) has stood still for {limit:.0f} s, or waits in MLX for a rank that has"
            self._fate.decide(RankLost(self._rank, reason))

    def _run(self) -> None:
        while self._fate.error is None:
            self._selector.select(max(0.0, self._next_beat - self._clock()))
            self.turn()
        self._linger()

    def _beat(self) -> None:
        with self._lock:
            for peer in self._peers:
                if self._fate.error is None:
                    # Nothing is sent to one that takes nothing; its silence says the rest, or its end does.
                    with suppress(OSError):
                        peer.sock.send(_BEAT)

    def _read(self, peer: Peer) -> None:
        received = take(peer.sock)
        if received == b"":
            self._selector.unregister(peer.sock)
            self._fate.decide(peer.lost("is gone: its connection was closed"))
        elif received is not None:
            self._heard(peer, received)

    def _heard(self, peer: Peer, received: bytes) -> None:
        peer.silence = 0.0
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            if (error := error_of(line)) is not None:
                self._fate.decide(error)
            elif line.startswith(_SILENCE) and peer.rank == 0:
                with suppress(ValueError):
                    self._timeout = float(line.removeprefix(_SILENCE))
        if len(peer.unread) > _MAX_LINE:
            self._fate.decide(peer.lost("has sent what is no sign of life"))

    def _linger(self) -> None:
        """Read until the others have closed: unread data would take the last line from them."""
        until = self._clock() + _LINGER
        while (left := until - self._clock()) > 0 and self._selector.get_map():
            for key, _ in self._selector.select(left):
                if not isinstance(key.data, Peer):
                    self._selector.unregister(self._woken)
                else:
                    self._drain(key.data)

    def _drain(self, peer: Peer) -> None:
        if take(peer.sock) == b"":
            self._selector.unregister(peer.sock)


def take(sock: socket.socket) -> bytes | None:
    """Return what has come on a connection: None if that is nothing, no bytes if it has ended."""
    try:
        return sock.recv(_MAX_LINE)
    except BlockingIOError:
        return None
    except OSError:
        return b""
