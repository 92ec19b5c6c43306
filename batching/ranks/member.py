"""The side of the other ranks of the TCP links."""

import socket
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Final

from batching.errors import RankLost
from batching.ranks.channel import Channel
from batching.ranks.control_port import CannotJoin
from batching.ranks.fate import Fate
from batching.ranks.frames import ConnectionEnded, framed, prepare, receive, send_frame
from batching.ranks.heartbeats import Guard, Heartbeats, Peer, no_guard
from batching.ranks.hello import MAX_HELLO_BYTES, START, Answer, Hello, read_answer

_RETRY_SECONDS: Final = 0.2


class _TryAgain(Exception):
    """Rank 0 is not there, or does not take this rank yet."""


class TcpMember:
    """The link of a rank to rank 0; see `batching.ranks.links.Member`.

    One thread at a time sends and receives; any thread may end the link.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        messages: socket.socket,
        heartbeats: socket.socket,
        on_end: Callable[[RankLost], None],
        guard: Guard = no_guard,
    ) -> None:
        """Own the connections.

        hosts: the names of the ranks' hosts.
        on_end: is called once, in any thread, when a rank is lost, rank 0 has ended, or `end` was called.
        guard: see `Guard`.
        """
        self._rank, self._on_end = rank, on_end
        self._fate = Fate(self._tell)
        self._channel = Channel(Peer(0, hosts[0], messages), self._fate)
        leader = Peer(0, hosts[0], heartbeats)
        self._heartbeats = Heartbeats(hosts[rank], rank, [leader], self._fate, guard)
        self._heartbeats.start()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def lost(self) -> RankLost | None:
        """Why the link has ended; None while it has not."""
        return self._fate.error

    def send(self, message: bytes) -> None:
        self._channel.send(framed(message))

    def receive(self) -> bytes:
        with self._heartbeats.unlimited():
            return self._channel.receive()

    def check(self) -> None:
        """Find out whether a rank is gone, which takes up to a second; see `Leader`."""
        self._fate.check()

    def limit(self, seconds: float | None) -> None:
        """Bound what this rank does; see `Leader`."""
        self._heartbeats.limit(seconds)

    def end(self, reason: RankLost) -> None:
        """End the link, and tell rank 0 why."""
        self._fate.decide(reason)

    def close(self) -> None:
        """End the link, wait for rank 0 to hear of it, for a second at most, and close the connections."""
        self.end(RankLost(self._rank, "has left"))
        self._heartbeats.close()
        self._channel.close()

    def _tell(self, error: RankLost) -> None:
        self._heartbeats.tell(error)
        self._channel.interrupt()
        self._on_end(error)


def join_ranks(
    address: tuple[str, int],
    hosts: Sequence[str],
    rank: int,
    timeout: float,
    on_end: Callable[[RankLost], None],
    guard: Guard = no_guard,
) -> TcpMember:
    """Connect to rank 0, again and again until it is there, and wait until all ranks are.

    address: of rank 0's control port.
    hosts: the names of the ranks' hosts, rank 0 included.
    timeout: in seconds, for all of that.
    on_end, guard: of the `TcpMember`.

    Raises:
        CannotJoin: rank 0 does not answer in time, or refuses this rank or another one.
    """
    deadline = monotonic() + timeout
    while True:
        try:
            sockets = _try(address, Hello(rank, len(hosts), "messages"), deadline)
            return TcpMember(rank, hosts, *sockets, on_end, guard)
        except _TryAgain as error:
            if monotonic() > deadline - _RETRY_SECONDS:
                place = f"rank 0 ({hosts[0]}) at {address[0]} port {address[1]}"
                raise CannotJoin(f"{place} was not there within {timeout:g} s: {error}") from None
        sleep(_RETRY_SECONDS)


def _try(
    address: tuple[str, int], hello: Hello, deadline: float
) -> tuple[socket.socket, socket.socket]:
    """Return the connections for messages and for heartbeats, when all ranks are there."""
    sockets: list[socket.socket] = []
    try:
        messages = _connect(address, deadline, sockets)
        answer = _ask(messages, hello)
        heartbeats = _connect(address, deadline, sockets)
        second = Hello(hello.rank, hello.num_ranks, "heartbeats", answer.token)
        send_frame(heartbeats, framed(second.encode()))
        # Until the last rank has come.
        said = receive(messages, MAX_HELLO_BYTES)
        if said != START:
            raise CannotJoin(said.decode(errors="replace"))
    except BaseException as error:
        for sock in sockets:
            sock.close()
        if isinstance(error, ConnectionEnded):
            raise _TryAgain(str(error)) from None
        raise
    return messages, heartbeats


def _connect(
    address: tuple[str, int], deadline: float, sockets: list[socket.socket]
) -> socket.socket:
    try:
        left = max(_RETRY_SECONDS, deadline - monotonic())
        sock = socket.create_connection(address, timeout=left)
    except OSError as error:
        raise _TryAgain(error.strerror or str(error)) from None
    sockets.append(sock)
    prepare(sock)
    return sock


def _ask(sock: socket.socket, hello: Hello) -> Answer:
    send_frame(sock, framed(hello.encode()))
    try:
        answer = read_answer(receive(sock, MAX_HELLO_BYTES))
    except ValueError:
        raise CannotJoin("what answers at rank 0's port is no server of this kind") from None
    if answer.refusal:
        raise CannotJoin(answer.refusal)
    if answer.is_taken:
        raise _TryAgain(f"it has a rank {hello.rank} already")
    return answer
