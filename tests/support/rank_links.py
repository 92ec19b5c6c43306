"""Links between ranks over real sockets of this machine, with clocks that a test advances."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from batching.errors import RankLost
from batching.ranks.control_port import ControlPort
from batching.ranks.frames import framed, receive
from batching.ranks.hello import Hello
from batching.ranks.leader import TcpLeader
from batching.ranks.member import TcpMember, join_ranks

HOSTS: Final = ("mac0", "mac1", "mac2", "mac3")


@dataclass
class Ends:
    """Notes how links have ended: `wait` returns the next one."""

    found: SimpleQueue[RankLost] = field(default_factory=SimpleQueue)

    def __call__(self, error: RankLost) -> None:
        self.found.put(error)

    def wait(self) -> RankLost:
        return self.found.get(timeout=30)


def control_port(num_ranks: int) -> tuple[ControlPort, tuple[str, int]]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return ControlPort(sock, HOSTS[:num_ranks]), sock.getsockname()


@dataclass
class Linked:
    leader: TcpLeader
    members: Sequence[TcpMember]
    leader_ends: Ends
    member_ends: Sequence[Ends]


@contextmanager
def linked(num_ranks: int) -> Iterator[Linked]:
    """Yield links that all ranks have joined; in the end they are closed."""
    port, address = control_port(num_ranks)
    ends = [Ends() for _ in range(num_ranks)]
    members: dict[int, TcpMember] = {}

    def join_as(rank: int) -> None:
        members[rank] = join_ranks(address, HOSTS[:num_ranks], rank, 30, ends[rank])

    threads = [threading.Thread(target=join_as, args=(rank,)) for rank in range(1, num_ranks)]
    for thread in threads:
        thread.start()
    leader = TcpLeader(port.join(30), HOSTS[:num_ranks], ends[0])
    for thread in threads:
        thread.join()
    with ExitStack() as stack:
        stack.callback(leader.close)
        for member in members.values():
            stack.callback(member.close)
        yield Linked(leader, [members[rank] for rank in sorted(members)], ends[0], ends[1:])


def stranger(address: tuple[str, int], *sent: bytes) -> socket.socket:
    """Return a connection on which something was sent."""
    sock = socket.create_connection(address, timeout=30)
    for piece in sent:
        sock.sendall(piece)
    return sock


def say_hello(address: tuple[str, int], hello: Hello) -> socket.socket:
    return stranger(address, framed(hello.encode()))


def is_dropped(sock: socket.socket) -> bool:
    """Return whether the other side closes a connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def answer(sock: socket.socket) -> bytes:
    return receive(sock)
