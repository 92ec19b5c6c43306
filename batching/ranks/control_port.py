"""Rank 0's port: other ranks connect to it, and whatever else does is dropped."""

import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from batching.errors import EngineError
from batching.ranks.frames import LENGTH, framed, prepare
from batching.ranks.hello import MAX_HELLO_BYTES, PROTOCOL, START, Answer, Hello, read_hello

# Connections that have not said who they are: how many, and for how many seconds.
_MAX_STRANGERS: Final = 32
_HELLO_SECONDS: Final = 5.0
# Seconds between two looks at whether to go on.
_LOOK_INTERVAL: Final = 0.2


class CannotJoin(EngineError):
    """The ranks do not come together; the message is one line for the operator."""


@dataclass(eq=False)
class _Stranger:
    """A connection whose hello has not come yet."""

    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)

    @property
    def num_missing(self) -> int:
        """How many bytes are missing: of the length, and then of the hello."""
        if len(self.received) < LENGTH.size:
            return LENGTH.size - len(self.received)
        (length,) = LENGTH.unpack_from(self.received)
        return int(length) - len(self.received) + LENGTH.size


@dataclass
class JoinedRank:
    """The two connections of a rank; `heartbeats` is None until the second one is there."""

    messages: socket.socket
    token: str
    heartbeats: socket.socket | None = None

    def close(self) -> None:
        self.messages.close()
        if self.heartbeats is not None:
            self.heartbeats.close()


class ControlPort:
    """Waits until each rank has connected; then the port is closed, so that no other connection is made.

    One thread owns it.  No connection can hold up another one: each has some seconds for a hello of
    limited length.
    """

    def __init__(
        self, sock: socket.socket, hosts: Sequence[str], clock: Callable[[], float] = monotonic
    ) -> None:
        """Own a bound socket; `hosts` are the names of the ranks' hosts, rank 0 included."""
        self._listener, self._hosts, self._clock = sock, hosts, clock
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Stranger] = []
        self._joined: dict[int, JoinedRank] = {}
        sock.setblocking(False)
        sock.listen()
        self._selector.register(sock, selectors.EVENT_READ)

    def join(
        self, timeout: float, check: Callable[[], None] = lambda: None
    ) -> dict[int, JoinedRank]:
        """Wait until all ranks are there; return their connections by rank, in order.

        timeout: in seconds.
        check: is called several times a second; what it raises ends the wait.

        Raises:
            CannotJoin: a rank has another protocol or number of ranks, or has not come in time.
        """
        deadline = self._clock() + timeout
        try:
            while self._missing():
                check()
                if self._clock() > deadline:
                    raise CannotJoin(self._late(timeout))
                self.turn(_LOOK_INTERVAL)
            self._tell(START)
            return {rank: self._joined.pop(rank) for rank in sorted(self._joined)}
        except CannotJoin as error:
            self._tell(str(error).encode())
            raise
        finally:
            self.close()

    def turn(self, timeout: float) -> None:
        """Take what has come on any connection, and drop those that have said nothing for too long.

        Raises:
            CannotJoin: a rank has another protocol.
        """
        for key, _ in self._selector.select(timeout):
            match key.data:
                case None:
                    self._accept()
                case _Stranger() as stranger:
                    self._read(stranger)
                case rank:
                    self._forget(rank)
        now = self._clock()
        newest = self._strangers[-_MAX_STRANGERS:]
        for stranger in [*self._strangers]:
            if now > stranger.deadline or stranger not in newest:
                self._drop(stranger)

    def close(self) -> None:
        """Close the port and all connections that were not given away."""
        for stranger in [*self._strangers]:
            self._drop(stranger)
        for joined in self._joined.values():
            joined.close()
        self._selector.close()
        self._listener.close()

    def _tell(self, message: bytes) -> None:
        """Tell those that wait for the others: that all are there, or why that will not be."""
        for joined in self._joined.values():
            _send(joined.messages, message)

    def _missing(self) -> list[int]:
        joined = {rank for rank, each in self._joined.items() if each.heartbeats is not None}
        return [rank for rank in range(1, len(self._hosts)) if rank not in joined]

    def _late(self, timeout: float) -> str:
        names = ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in self._missing())
        return f"not connected within {timeout:g} s: {names}"

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # It has left, or there are no more descriptors.
            return
        sock.setblocking(False)
        stranger = _Stranger(sock, self._clock() + _HELLO_SECONDS)
        self._strangers.append(stranger)
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._take(stranger).close()

    def _take(self, stranger: _Stranger) -> socket.socket:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.sock)
        return stranger.sock

    def _read(self, stranger: _Stranger) -> None:
        try:
            piece = stranger.sock.recv(stranger.num_missing)
        except OSError:
            piece = b""
        has_length = len(stranger.received) >= LENGTH.size
        stranger.received += piece
        if not piece or stranger.num_missing > MAX_HELLO_BYTES:
            self._drop(stranger)
        elif has_length and not stranger.num_missing:
            self._answer(stranger)

    def _answer(self, stranger: _Stranger) -> None:
        try:
            hello = read_hello(bytes(stranger.received[LENGTH.size :]))
        except ValueError:
            self._drop(stranger)
            return
        if refusal := self._refusal(hello):
            _send(stranger.sock, Answer(refusal=refusal).encode())
            raise CannotJoin(refusal)
        if hello.channel == "heartbeats":
            self._complete(stranger, hello)
        elif not 0 < hello.rank < len(self._hosts) or hello.rank in self._joined:
            _send(stranger.sock, Answer(is_taken=True).encode())
            self._drop(stranger)
        else:
            sock = self._take(stranger)
            prepare(sock)
            joined = self._joined[hello.rank] = JoinedRank(sock, secrets.token_hex(16))
            # What it says before all are there is that it leaves.
            self._selector.register(sock, selectors.EVENT_READ, hello.rank)
            _send(sock, Answer(token=joined.token).encode())

    def _refusal(self, hello: Hello) -> str:
        """Return in what a rank differs so that it cannot be talked with; empty if it does not."""
        name = f"rank {hello.rank} ({self._host(hello.rank)})"
        if hello.protocol != PROTOCOL:
            return f"{name} has protocol {hello.protocol}, rank 0 has {PROTOCOL}"
        if hello.num_ranks != len(self._hosts):
            return f"{name} has a file of {hello.num_ranks} hosts, rank 0 has one of {len(self._hosts)}"
        return ""

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if 0 <= rank < len(self._hosts) else "unknown"

    def _complete(self, stranger: _Stranger, hello: Hello) -> None:
        joined = self._joined.get(hello.rank)
        if (
            joined is None
            or joined.heartbeats is not None
            or not secrets.compare_digest(joined.token.encode(), hello.token.encode())
        ):
            self._drop(stranger)
            return
        joined.heartbeats = self._take(stranger)
        prepare(joined.heartbeats)

    def _forget(self, rank: int) -> None:
        """Forget a rank that has left: it, or another one with its number, may come again."""
        joined = self._joined.pop(rank)
        self._selector.unregister(joined.messages)
        joined.close()


def _send(sock: socket.socket, message: bytes) -> None:
    try:
        # The buffer of a connection on which little was sent has room for it.
        sock.sendall(framed(message))
    except OSError:
        # It has left, which is found next.
        return
