"""HTTP on real sockets, byte by byte: a server in another thread, and the client's end."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from app.http.streams.unsent_bytes import UnsentBytes
from app.server.connection_limit import ConnectionLimit
from app.server.http_protocol import MAX_HEAD_BYTES, protocol_class
from app.server.uvicorn_server import bind

# Seconds.  A test that waits that long has failed.
LONG: Final = 20.0
# A timeout that is to pass.
SHORT: Final = 0.05

GET: Final = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET: Final = b"GET /z HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def timers_have_fired() -> None:
    """Return when every timer of the loop that is due by now has fired: this one is the last."""
    fired = asyncio.Event()
    asyncio.get_running_loop().call_later(0, fired.set)
    await fired.wait()


class Connection:
    """The client's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def read(self, end: bytes) -> bytes:
        """Read until the data ends with this."""
        data = b""
        while not data.endswith(end):
            piece = self._sock.recv(1 << 16)
            assert piece, data
            data += piece
        return data

    def read_until(self, part: bytes) -> bytes:
        """Read until the data has this in it."""
        data = b""
        while part not in data:
            piece = self._sock.recv(1 << 16)
            assert piece, data
            data += piece
        return data

    def read_within(self, seconds: float) -> bytes:
        """Return what comes within some seconds; empty for nothing."""
        self._sock.settimeout(seconds)
        try:
            return self._sock.recv(1 << 16)
        except TimeoutError:
            return b""
        finally:
            self._sock.settimeout(LONG)

    def read_all(self) -> bytes:
        """Read until the server closes, or resets what it had not read."""
        data = b""
        try:
            while piece := self._sock.recv(1 << 16):
                data += piece
        except ConnectionResetError:
            pass
        return data

    def reset(self) -> None:
        """Close with a TCP reset."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._sock.close()


class Site:
    """A server that runs in another thread."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket) -> None:
        self.server = server
        self.address = sock.getsockname()
        self._thread = threading.Thread(target=server.run, args=([sock],))
        self._thread.start()

    def stop(self) -> None:
        """Shut down gracefully, and wait for the end."""
        self.server.should_exit = True
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the server does not stop"

    @contextmanager
    def connection(self, receive_buffer: int | None = None) -> Iterator[Connection]:
        with socket.socket() as sock:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(LONG)
            sock.connect(self.address)
            yield Connection(sock)

    def ask(self, data: bytes) -> bytes:
        """Send, and return everything received until the server closes."""
        with self.connection() as connection:
            connection.send(data)
            return connection.read_all()


@contextmanager
def running(
    app: ASGIApp,
    *,
    read_timeout: float = LONG,
    write_timeout: float = LONG,
    keep_alive: int = int(LONG),
    limit: ConnectionLimit | None = None,
    unsent: UnsentBytes | None = None,
) -> Iterator[Site]:
    """Serve in another thread, on real sockets."""
    config = uvicorn.Config(
        app,
        http=protocol_class(
            read_timeout=read_timeout,
            write_timeout=write_timeout,
            limit=limit or ConnectionLimit(1000),
            unsent=unsent or UnsentBytes(),
        ),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=keep_alive,
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    with started(uvicorn.Server(config)) as site:
        yield site


@contextmanager
def started(server: uvicorn.Server) -> Iterator[Site]:
    """Run a server in another thread, on a port of its own."""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        site = Site(server, sock)
        try:
            yield site
        finally:
            site.stop()


def split(response: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, header fields and body of one response."""
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields, body
