"""What a client sends on a connection, up to the app."""

import asyncio
import socket
from typing import Any, Final

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.http.streams.unsent_bytes import UnsentBytes
from app.server.connection_limit import ConnectionLimit
from app.server.http_protocol import MAX_HEAD_BYTES, protocol_class
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target, pieces_of

_WORDS: Final = (
    *(b"\r\n", b"\n", b"\r\n\r\n", b"0\r\n\r\n", b"1\r\na\r\n", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"),
    *(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST ", b"HEAD ", b"CONNECT ", b"Host: x\r\n"),
    *(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"\0", b"\x80", b"\t", b":", b"%0a", b"?"),
)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Turns of the loop in which an app would have responded.
_TURNS: Final = 6

_loop: Final = asyncio.new_event_loop()
asyncio.set_event_loop(_loop)
_socket: Final = socket.socket()


class _Transport(asyncio.Transport):
    """Keeps what is written, and can be read on for as long as it is not closed."""

    def __init__(self) -> None:
        super().__init__({"socket": _socket})
        self.written = bytearray()
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


class _App:
    """Responds with what it was called with, and looks at that."""

    def __init__(self) -> None:
        self.served: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        assert not {b"content-length", b"transfer-encoding"} <= headers.keys()
        assert not any(c in value for value in headers.values() for c in (b"\r", b"\n", b"\0"))
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                self.served.append((scope["path"], body))
                length = headers.get(b"content-length", str(len(body)).encode())
                assert int(length) == len(body)
                break
        fields = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b"ok"})


_app: Final = _App()
_config: Final = uvicorn.Config(_app, log_config=None, access_log=False)
_config.h11_max_incomplete_event_size = MAX_HEAD_BYTES
_Protocol: Final = protocol_class(
    read_timeout=60, write_timeout=60, limit=ConnectionLimit(1000), unsent=UnsentBytes()
)


def run(data: bytes) -> None:
    """How it is split decides nothing; nothing is raised, and nothing of it is another request."""
    whole = _loop.run_until_complete(_served([data] if data else []))
    split = _loop.run_until_complete(_served(pieces_of(data)))
    assert split == whole, (split, whole)


async def _served(pieces: list[bytes]) -> tuple[list[tuple[str, bytes]], bytes]:
    """Return what the app was called with, and what was responded."""
    raised: list[Any] = []
    _loop.set_exception_handler(lambda _, context: raised.append(context))
    _app.served = []
    protocol = _Protocol(_config, ServerState(), {})
    transport = _Transport()
    protocol.connection_made(transport)
    for piece in pieces:
        if not transport.closing:
            protocol.data_received(piece)
        await _idle(transport)
    served = _app.served
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
    assert not raised, raised
    # Whether it is sent depends on whether the body has begun to come.
    return served, bytes(transport.written).replace(_CONTINUE, b"")


async def _idle(transport: _Transport) -> None:
    """Return when nothing more is responded to what has come so far."""
    num_written = -1
    while num_written < len(transport.written):
        num_written = len(transport.written)
        for _ in range(_TURNS):
            await asyncio.sleep(0)


# So much is read at once: of longer heads it depends on the reads which of their faults is found first.
TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS), max_bytes=1 << 14)
