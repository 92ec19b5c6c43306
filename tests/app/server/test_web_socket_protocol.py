"""WebSockets within the limits of all connections."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.server.connection_limit import ConnectionLimit
from app.server.web_socket_protocol import web_socket_class

pytestmark = pytest.mark.anyio


class FullTransport(asyncio.Transport):
    """A connection whose client reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return 1000

    def abort(self) -> None:
        self.aborted.set()


async def test_a_client_that_reads_nothing_is_aborted() -> None:
    config = uvicorn.Config(lambda *_: None)
    config.load()
    kind = web_socket_class(write_timeout=0.01, limit=ConnectionLimit(1))
    protocol = kind(config, ServerState(), {})
    protocol.connection_made(transport := FullTransport())
    protocol.pause_writing()
    protocol.resume_writing()
    assert not transport.aborted.is_set()
    protocol.pause_writing()
    await transport.aborted.wait()
