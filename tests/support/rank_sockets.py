"""Links between the ranks of a test: plain blocking sockets, and no heartbeats."""

import socket
import struct
import time
from collections.abc import Sequence

from batching.ranks.links import RankLost

_HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_HOST, 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class SocketLeader:
    """A `Leader`; members say their rank when they connect."""

    def __init__(self, port: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        found: dict[int, socket.socket] = {}
        with socket.create_server((_HOST, port)) as server:
            while len(found) < num_ranks - 1:
                connection, _ = server.accept()
                found[_read(connection, 0)[0]] = connection
        self._members = [found[rank] for rank in range(1, num_ranks)]

    def send(self, message: bytes) -> None:
        for rank, member in enumerate(self._members, 1):
            _write(member, message, rank)

    def receive(self) -> Sequence[bytes]:
        return [_read(member, rank) for rank, member in enumerate(self._members, 1)]

    def check(self) -> None:
        """Plain sockets do not know."""


class SocketMember:
    """A `Member`."""

    def __init__(self, port: int, rank: int) -> None:
        self.rank = rank
        self._leader = _connected(port)
        self.send(bytes([rank]))

    def send(self, message: bytes) -> None:
        _write(self._leader, message, 0)

    def receive(self) -> bytes:
        return _read(self._leader, 0)


def _connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((_HOST, port))
        except ConnectionRefusedError:
            # Rank 0 may start later.
            time.sleep(0.02)


def _write(connection: socket.socket, message: bytes, rank: int) -> None:
    try:
        connection.sendall(struct.pack("<I", len(message)) + message)
    except OSError as error:
        raise RankLost(rank, f"is gone: {error}") from error


def _read(connection: socket.socket, rank: int) -> bytes:
    try:
        (size,) = struct.unpack("<I", _exactly(connection, 4))
        return _exactly(connection, size)
    except OSError as error:
        raise RankLost(rank, f"is gone: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the connection was closed")
        data += part
    return data
