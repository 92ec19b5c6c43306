"""The process: listening, and an end that lets open requests finish."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from app.server.http_protocol import MAX_HEAD_BYTES, protocol_class
from app.server.watchdog import Watchdog
from app.server_state import ServerState

logger = logging.getLogger(__name__)

# Seconds for the last step of the model and for the error events.
_LAST_WORDS: Final = 10

# Seconds for which an idle connection is kept: longer than clients and balancers keep theirs, so
# that no request comes just when it is closed.
_KEEP_ALIVE: Final = 75

# Seconds within which two signals are one.
_SAME_WISH: Final = 1.0


class BindError(Exception):
    """The address cannot be listened on; one line for the person who started the server."""


def bind(host: str, port: int) -> socket.socket:
    """Take the address without listening yet: connections are refused until `serve`.

    Raises:
        BindError: it is in use, not ours, or no address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _bind_error(host, port, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def _bind_error(host: str, port: int, error: OSError | UnicodeError) -> BindError:
    reason = error.strerror if isinstance(error, OSError) else "no name of a host"
    return BindError(f"cannot listen on {host} port {port}: {reason}")


def serve(
    app: FastAPI, sock: socket.socket, on_listening: Callable[[], None] = lambda: None
) -> int:
    """Answer requests until a signal, and let the open ones finish; return the exit status.

    Raises:
        BindError: somebody else listens on the address since it was taken.
    """
    server = Server(app, app.state.service)
    # uvicorn does this, too, but a signal may come before; afterwards it changes nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    try:
        sock.listen()
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _bind_error(host, port, error) from None
    on_listening()
    server.run(sockets=[sock])
    return server.exit_status


class Server(uvicorn.Server):
    """Ends in good order.

    Told to stop, it goes on listening, so that whoever comes is told where things stand:
    `/ready` and new requests get a 503 from that moment on.  Open requests finish, or hear an
    error once their time is over or a second signal comes.  Then the process ends.
    """

    def __init__(self, app: FastAPI, service: ServerState) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_class(
                    read_timeout=settings.read_timeout, write_timeout=settings.write_timeout
                ),
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )
        self.exit_status = 0
        self._service = service
        self._watchdog = Watchdog(service, on_failure=self._end_if_failed, on_tick=service.tick)
        self._told_at: float | None = None
        self._is_urgent = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end; a second signal cuts it short.  Runs between two operations of Python."""
        now = monotonic()
        self._service.admission.is_draining = True
        if self._told_at is None:
            self._told_at = now
        # A supervisor and a terminal may both send one at once: that is one wish.
        elif now - self._told_at > _SAME_WISH:
            self._is_urgent = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watchdog.run())

    async def on_tick(self, counter: int) -> bool:
        """Return True when nothing keeps the server from ending; uvicorn asks ten times a second."""
        await super().on_tick(counter)
        if self._told_at is None:
            return False
        is_over = monotonic() > self._told_at + self._service.settings.shutdown_timeout
        return self._is_urgent or is_over or not self._service.in_flight.num_open

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close; what is still open hears that the engine has stopped, and ends."""
        self._watching.cancel()
        if num_open := self._service.in_flight.num_open:
            logger.warning("%d requests are ended before they are complete", num_open)
        # It asks the engines to end and does not wait for it.
        self._service.manager.close(0)
        await super().shutdown(sockets)

    def _end_if_failed(self) -> None:
        if self._service.settings.exit_on_engine_failure:
            self._service.admission.is_draining = True
            self._told_at, self._is_urgent, self.exit_status = monotonic(), True, 1
