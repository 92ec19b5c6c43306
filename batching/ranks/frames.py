"""Messages on a TCP connection: each is its length in four bytes, and then itself."""

import socket
import struct
from typing import Final

LENGTH: Final = struct.Struct("!I")
# A plan with the images of its requests is the largest there is.
MAX_MESSAGE_BYTES: Final = 1 << 28
_READ_BYTES: Final = 1 << 18


class ConnectionEnded(Exception):
    """The other side has closed the connection, it was cut, or what came is no message."""


def prepare(sock: socket.socket) -> None:
    """Let messages leave at once: a rank waits for each."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def framed(message: bytes) -> bytes:
    """Return the bytes that stand for a message.

    Raises:
        ValueError: it is longer than `MAX_MESSAGE_BYTES`.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message to another rank has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}"
        )
    return LENGTH.pack(len(message)) + message


def send_frame(sock: socket.socket, frame: bytes) -> None:
    """Send what `framed` has returned, and wait until the system has taken it.

    Raises:
        ConnectionEnded: the connection has ended.
    """
    try:
        sock.sendall(frame)
    except OSError as error:
        raise ConnectionEnded(error.strerror or str(error)) from None


def receive(sock: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Wait for a message.

    Raises:
        ConnectionEnded: the connection has ended, a time limit of the socket is over, or the message is longer.
    """
    (length,) = LENGTH.unpack(_received(sock, LENGTH.size))
    if length > max_bytes:
        raise ConnectionEnded(f"a message of {length} bytes")
    return _received(sock, length)


def _received(sock: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes; room is made for those only that have come."""
    pieces: list[bytes] = []
    while num_bytes:
        try:
            piece = sock.recv(min(num_bytes, _READ_BYTES))
        except OSError as error:
            raise ConnectionEnded(error.strerror or str(error)) from None
        if not piece:
            raise ConnectionEnded("the connection was closed")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
