"""The connection for messages between rank 0 and one other rank."""

import socket
from contextlib import suppress

from batching.errors import RankLost
from batching.ranks.fate import Fate
from batching.ranks.frames import ConnectionEnded, receive, send_frame
from batching.ranks.heartbeats import Peer


class Channel:
    """Sends and receives messages, in order, until the link has ended; one thread at a time uses it."""

    def __init__(self, peer: Peer, fate: Fate) -> None:
        """Own the connection of a peer."""
        self._peer, self._fate = peer, fate
        peer.sock.settimeout(None)

    def send(self, frame: bytes) -> None:
        """Send what `framed` has returned.

        Raises:
            RankLost: the link has ended.
        """
        self._check()
        try:
            send_frame(self._peer.sock, frame)
        except ConnectionEnded as error:
            raise self._reason(error) from None

    def receive(self) -> bytes:
        """Wait for a message.

        Raises:
            RankLost: the link has ended.
        """
        self._check()
        try:
            return receive(self._peer.sock)
        except ConnectionEnded as error:
            raise self._reason(error) from None

    def interrupt(self) -> None:
        """Let a thread go on that waits for a message, or for room for one; any thread may call it."""
        with suppress(OSError):
            self._peer.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._peer.sock.close()

    def _check(self) -> None:
        if (error := self._fate.error) is not None:
            raise error.with_traceback(None)

    def _reason(self, error: ConnectionEnded) -> RankLost:
        """Return why the connection has ended.

        Raises:
            RankLost: the heartbeats know better; they end at once with it.
        """
        self._fate.check()
        return self._fate.decide(self._peer.lost(f"is gone: {error}"))
