"""Requests as bytes, and what comes back."""

import socket
from http.client import HTTPResponse
from typing import Final, NamedTuple

_TIMEOUT: Final = 10.0


class Answer(NamedTuple):
    """`header_names` are in lower case."""

    status: int
    content_type: str
    body: bytes
    header_names: frozenset[str] = frozenset()


def exchange(address: tuple[str, int], request: bytes) -> Answer:
    """Send a request as it stands, on a connection of its own."""
    with socket.create_connection(address, timeout=_TIMEOUT) as sock:
        sock.sendall(request)
        response = HTTPResponse(sock)
        response.begin()
        names = frozenset(name.lower() for name in response.headers)
        return Answer(response.status, response.headers.get_content_type(), response.read(), names)


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    length = f"Content-Length: {len(body)}"
    return head("POST", path, f"Content-Type: {content_type}", length) + body
