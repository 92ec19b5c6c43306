"""One HTTP/1.1 request on a connection of its own, over which its sender has full control."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple, Self

from scripts.server_process import Address

# Closing with this sends a reset instead of the end of the stream.
_RESET: Final = struct.pack("ii", 1, 0)


class Head(NamedTuple):
    """The status and the headers of a response; names are in lower case."""

    status: int
    headers: Mapping[str, str]


class Broken(Exception):
    """The connection ended before the response did, or what came is no HTTP."""


def request_bytes(path: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Return a request as it goes over the wire: a POST if it has a body, or else a GET."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Exchange:
    """A connection for one request; its opener closes or resets it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: Address, *, receive_buffer: int | None = None) -> Self:
        """Connect; `receive_buffer` bounds the bytes that the system takes in for us."""
        sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        try:
            sock.setblocking(False)
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await asyncio.get_running_loop().sock_connect(sock, address)
            # Not more than one piece ahead of its reader.
            return cls(*await asyncio.open_connection(sock=sock, limit=1 << 16))
        except BaseException:
            sock.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def head(self) -> Head:
        """Read the status and the headers.

        Raises:
            Broken: there are none.
        """
        try:
            text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = text.split("\r\n")[:-2]
            pairs = (line.partition(":") for line in lines)
            return Head(int(status.split()[1]), {n.lower(): v.strip() for n, _, v in pairs})
        except (OSError, EOFError, ValueError, LookupError) as error:
            raise Broken(f"no head: {type(error).__name__}") from error

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            Broken: it does not come to its end.
        """
        try:
            if head.headers.get("transfer-encoding") != "chunked":
                yield await self._reader.readexactly(int(head.headers.get("content-length", "0")))
                return
            while size := int(await self._reader.readline(), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        except (OSError, EOFError, ValueError) as error:
            raise Broken(f"no end of the body: {type(error).__name__}") from error

    async def skip_to_end(self) -> None:
        """Read until the other side closes or resets, whatever comes."""
        try:
            while await self._reader.read(1 << 16):
                pass
        except OSError:
            pass

    def pause(self) -> None:
        """Read nothing from now on."""
        self._transport.pause_reading()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and stay to read."""
        self._writer.write_eof()

    def reset(self) -> None:
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET
        )
        self._transport.abort()

    def close(self) -> None:
        """Close at once; what was not sent yet is lost."""
        self._transport.abort()

    @property
    def _transport(self) -> asyncio.Transport:
        return self._writer.transport  # type: ignore[return-value]
