"""uvicorn's protocol of WebSockets, within the limits of all connections."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from app.server.connection_limit import ConnectionLimit
from app.server.timers import WriteTimeout


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket; it pings its client, and is aborted if that reads nothing."""

    limit: ConnectionLimit
    write_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout = WriteTimeout(self.loop, self.write_timeout)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # In the place of the connection that it was before.
        self.limit.admit(self)
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.forget(self)
        self._write_timeout.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timeout.start(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timeout.stop()


def web_socket_class(*, write_timeout: float, limit: ConnectionLimit) -> type[WebSocketProtocol]:
    """Return the class for `uvicorn.Config(ws=...)`; the arguments are those of `protocol_class`."""
    members = {"write_timeout": write_timeout, "limit": limit}
    return type("WebSocketProtocol", (WebSocketProtocol,), members)
