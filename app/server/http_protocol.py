"""uvicorn's HTTP protocol over h11, with a timeout for each wait for a client.

uvicorn waits without limit for the head of a request, for the rest of an unread body, and for a client
to read its response.  Each such connection takes memory and delays a shutdown.
"""

import asyncio
import logging
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from app.http.errors.formats import ErrorReport, openai_error
from app.http.streams.unsent_bytes import UnsentBytes
from app.server.connection_limit import TOO_MANY, ConnectionLimit
from app.server.dead_peers import notice_dead_peers
from app.server.timers import Timer, WriteTimeout

logger = logging.getLogger(__name__)

# Where a WebSocket can be opened.
_SOCKET_PATH: Final = "/v1/responses"

# uvicorn logs a warning for each faulty request of a client; errors are faults of the server.
_uvicorn_logger: Final = logging.getLogger("uvicorn.error.protocol")
_uvicorn_logger.setLevel(logging.ERROR)

# For uvicorn's setting h11_max_incomplete_event_size; a head may exceed it by one read.
MAX_HEAD_BYTES: Final = 32 * 1024

# asyncio reads 256 KiB at once; as chunks of one byte each, they block the event loop for a quarter
# of a second.
_READ_BYTES: Final = 16 * 1024

_MESSAGES: Final = {
    408: "the head of the request was not received in time",
    431: "the head of the request is larger than the limit",
    501: "the server does not support this Transfer-Encoding",
    413: f"more than {MAX_HEAD_BYTES} bytes arrived before the response to the request before them",
    503: "the server has too many open connections; please try again",
}
_CODES: Final = {408: "request_timeout", 503: TOO_MANY}
_TYPES: Final = {503: "server_error"}
_HEADERS: Final = {503: [("Retry-After", "1")]}

# Seconds for which the client of a refused connection may read the response.  Were it closed at once, with
# a request that was not read, the client would see a reset.
_LINGER: Final = 1.0


# The states of a request that is read to its end; the second one, which h11 documents and does not list, if it asks to upgrade.
_REQUEST_READ: Final = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]


class _Connection(h11.Connection):
    """Rejects a body with two lengths: a proxy may go by the other one, and take its end for a request.

    h11 goes by `Transfer-Encoding` and keeps the connection, which RFC 9112 (section 6.1) forbids.
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and _has_two_lengths(event):
            raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length")
        return event


def _has_two_lengths(request: h11.Request) -> bool:
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}


class Protocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection; as a BufferedProtocol it determines how much is read at once.

    Beside asyncio's methods it overrides uvicorn's `_should_upgrade`, `handle_websocket_upgrade`,
    `on_response_complete`, `send_400_response` and `shutdown`, sets `app`, `conn` and `logger`, and reads
    `cycle`, `loop`, `scope`, `transport` and `timeout_keep_alive_task`.
    """

    read_timeout: float
    write_timeout: float
    limit: ConnectionLimit
    unsent: UnsentBytes

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        max_head = config.h11_max_incomplete_event_size or MAX_HEAD_BYTES
        self.conn = _Connection(h11.SERVER, max_head)
        self.logger = _uvicorn_logger
        self._incoming = bytearray()
        self._read_timer = Timer(self.loop, self.read_timeout, self._give_up_reading)
        self._write_timeout = WriteTimeout(self.loop, self.write_timeout)
        self._linger_timer = Timer(self.loop, _LINGER, lambda: self.transport.close())
        self._is_upgraded = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.limit.admit(self):
            self._refuse()
            return
        notice_dead_peers(transport.get_extra_info("socket"), self.write_timeout)
        # Writing is paused while anything is buffered here, so that the timer covers all of it.
        transport.set_write_buffer_limits(high=0)
        self.app = self.unsent.in_pieces(self.app, transport.abort)
        self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.forget(self)
        self._linger_timer.stop()
        self._read_timer.stop()
        self._write_timeout.stop()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        self._incoming = bytearray(_READ_BYTES)
        return self._incoming

    def buffer_updated(self, nbytes: int) -> None:
        data, self._incoming = bytes(memoryview(self._incoming)[:nbytes]), bytearray()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self.limit.set_idle(self, is_idle=False)
        super().data_received(data)
        if not self._is_upgraded:
            self._watch_reading()

    def _should_upgrade(self) -> bool:
        """Return whether a WebSocket is opened; other requests to upgrade are served without it, as HTTP allows."""
        is_known = (self.scope["method"], self.scope["path"]) == ("GET", _SOCKET_PATH)
        return is_known and super()._should_upgrade()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the protocol of WebSockets, which counts it from now on."""
        self._is_upgraded = True
        self._read_timer.stop()
        self._write_timeout.stop()
        self.limit.forget(self)
        super().handle_websocket_upgrade(event)

    def handle_events(self) -> None:
        """Read on beyond a complete request, up to a limit: uvicorn pauses, and would not see a disconnect."""
        super().handle_events()
        if self._is_upgraded:
            return
        if self.conn.their_state in _REQUEST_READ and (ahead := self.conn.trailing_data[0]):
            if len(ahead) > MAX_HEAD_BYTES:
                self._reject(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reading()
        is_between_requests = self.conn.their_state is h11.IDLE and not self._has_part_of_head()
        self.limit.set_idle(self, is_idle=is_between_requests and not self.transport.is_closing())

    def shutdown(self) -> None:
        """Close when idle; uvicorn would raise for a broken connection that is closing."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP; uvicorn calls this while it handles h11's exception."""
        self._reject(getattr(sys.exception(), "error_status_hint", 400))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timeout.start(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timeout.stop()

    def _watch_reading(self) -> None:
        if self._waits_for_client() and not self.transport.is_closing():
            self._read_timer.start()
        else:
            self._read_timer.stop()

    def _waits_for_client(self) -> bool:
        """Return True if the client has to send more and no other timer is running.

        That is a head, or the rest of a body whose request has its response already.  Between two
        requests uvicorn's keep-alive timer runs, but not once a part of a head has arrived.
        """
        if self.conn.their_state is h11.IDLE:
            return self.timeout_keep_alive_task is None or self._has_part_of_head()
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _has_part_of_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] != b""

    def _give_up_reading(self) -> None:
        if self._has_part_of_head():
            self._reject(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _refuse(self) -> None:
        """Respond before there is a request, and close when the client has read it."""
        self._is_refused = True
        if not self.limit.may_linger(self):
            self._reject(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self._respond(HTTPStatus.SERVICE_UNAVAILABLE)
        self.transport.write_eof()
        self._linger_timer.start()

    def _reject(self, status: int) -> None:
        """Respond in place of the app, and close."""
        self._respond(status)
        if self.cycle is not None:
            # uvicorn would notify the app only after the client has read the response.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _respond(self, status: int) -> None:
        logger.debug("a connection ends with status %d", status)
        report = ErrorReport(
            status=status,
            message=_MESSAGES.get(status, "the request is not valid HTTP"),
            type=_TYPES.get(status, "invalid_request_error"),
            code=_CODES.get(status),
        )
        body = openai_error(report).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *_HEADERS.get(status, ()),
        ]
        reason = HTTPStatus(status).phrase
        head = h11.Response(status_code=status, headers=headers, reason=reason)
        # It raises if a response has started, and for the body of a response to HEAD.
        with suppress(h11.LocalProtocolError):
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")


def protocol_class(
    *, read_timeout: float, write_timeout: float, limit: ConnectionLimit, unsent: UnsentBytes
) -> type[Protocol]:
    """Return the class for `uvicorn.Config(http=...)`.

    read_timeout: seconds from the connection, or the first byte of a later request, to the whole head.
    write_timeout: seconds within which a client must read some of the buffered data.
    limit, unsent: shared by all connections of one server.
    """
    members = {
        "read_timeout": read_timeout,
        "write_timeout": write_timeout,
        "limit": limit,
        "unsent": unsent,
    }
    return type("Protocol", (Protocol,), members)
