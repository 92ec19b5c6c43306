"""Runs the app with uvicorn; a shutdown lets requests in flight finish."""

import asyncio
import logging
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from app.server.connection_limit import (
    ConnectionLimit,
    fitting_backlog,
    fitting_connections,
    fitting_lingering,
    max_files,
)
from app.server.http_protocol import MAX_HEAD_BYTES, protocol_class
from app.server.stop_signals import set_stop_handler
from app.server.watchdog import Watchdog
from app.server.web_socket_protocol import web_socket_class
from app.server_state import ServerState
from app.settings import env_name

logger = logging.getLogger(__name__)

# Seconds for the last step of the model and for sending the error events.
_CLOSE_TIMEOUT: Final = 10

# Seconds for which an idle connection is kept: longer than clients and load balancers keep theirs,
# so that no request arrives while it is being closed.
_KEEP_ALIVE: Final = 75

# Seconds for which probes and new requests are told that a rank is lost, and which one.
_RANK_LOST_SECONDS: Final = 1.0

# Seconds within which two signals count as one.
_SIGNAL_DEBOUNCE: Final = 1.0


class BindError(Exception):
    """The server cannot listen on the address; the message is one line for the operator."""


def bind(host: str, port: int) -> socket.socket:
    """Bind the address without listening: connections are refused until `serve` is called.

    Raises:
        BindError: the address is in use, belongs to another machine, or is invalid.
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
    reason = error.strerror if isinstance(error, OSError) else "not a host name"
    return BindError(f"cannot listen on {host} port {port}: {reason}")


def serve(
    app: FastAPI, sock: socket.socket, on_listening: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal arrives, let the requests in flight finish, and return the exit status.

    Raises:
        BindError: another process has started to listen on the address.
    """
    server = Server(app, app.state.service)
    # uvicorn installs the same handlers later, except for SIGHUP; a signal may arrive before.
    set_stop_handler(server.handle_exit)
    try:
        sock.listen()
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _bind_error(host, port, error) from None
    on_listening()
    server.run(sockets=[sock])
    return server.exit_status


class Server(uvicorn.Server):
    """A uvicorn server that shuts down gracefully.

    After the first signal it still listens, but `/ready` and new requests get a 503.  Requests in flight
    finish; those that have not after the shutdown timeout or at a second signal end with an error.  Then
    the process exits.
    """

    def __init__(self, app: FastAPI, service: ServerState) -> None:
        settings = service.settings
        num_files = max_files()
        max_connections = fitting_connections(settings.max_connections, num_files)
        if max_connections < settings.max_connections:
            line = "at most %d connections: %s has room for no more in %d open files (ulimit -n)"
            logger.warning(line, max_connections, env_name("max_connections"), num_files)
        limit = ConnectionLimit(
            max_connections,
            service.metrics.count_rejection,
            max_lingering=fitting_lingering(num_files),
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_class(
                    read_timeout=settings.read_timeout,
                    write_timeout=settings.write_timeout,
                    limit=limit,
                    unsent=service.unsent,
                ),
                ws=web_socket_class(write_timeout=settings.write_timeout, limit=limit),
                ws_max_size=settings.max_body_bytes,
                # It costs time and, for each connection, memory.
                ws_per_message_deflate=False,
                backlog=fitting_backlog(num_files),
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT,
            )
        )
        self.exit_status = 0
        self._service = service
        self._watchdog = Watchdog(
            service, on_failure=self._exit_if_configured, on_tick=service.tick
        )
        self._shutdown_requested_at: float | None = None
        self._force_exit = False
        self._failed_at: float | None = None
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Request the shutdown; a second signal forces it.  Runs between two Python operations."""
        now = monotonic()
        self._service.admission.is_draining = True
        if self._shutdown_requested_at is None:
            self._shutdown_requested_at = now
        # A supervisor and a terminal may both send one at the same time.
        elif now - self._shutdown_requested_at > _SIGNAL_DEBOUNCE:
            self._force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watchdog.run())
        self._service.batches.wake()
        if self._service.warmer is not None:
            self._service.warmer.start()

    async def on_tick(self, counter: int) -> bool:
        """Return True when the server can exit; uvicorn calls it ten times a second."""
        await super().on_tick(counter)
        if self._shutdown_requested_at is None:
            return False
        if not self._is_draining:
            # Not in the handler, which may have interrupted another line of the log.
            self._is_draining = True
            if self._service.warmer is not None:
                self._service.warmer.stop()
            logger.info("shutting down; requests in flight: %d", self._service.in_flight.num_open)
        if self._failed_at is not None:
            return monotonic() > self._failed_at + self._last_seconds
        is_timeout = (
            monotonic() > self._shutdown_requested_at + self._service.settings.shutdown_timeout
        )
        return self._force_exit or is_timeout or not self._service.in_flight.num_open

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close; requests still in flight end with the error that the engine has stopped."""
        self._watching.cancel()
        if num_open := self._service.in_flight.num_open:
            logger.warning("%d requests are ended before they are complete", num_open)
        if self._service.warmer is not None:
            await self._service.warmer.close()
        await self._service.batches.close()
        # This does not wait for the engines to end.
        self._service.manager.close(0)
        await super().shutdown(sockets)
        logger.info("the server has stopped")

    @property
    def _last_seconds(self) -> float:
        return _RANK_LOST_SECONDS if self._service.manager.health.is_divided else 0.0

    def _exit_if_configured(self) -> None:
        """Exit if a supervisor is to restart the engine; ranks can only be started again all together."""
        if self._service.settings.exit_on_engine_failure or self._service.manager.health.is_divided:
            self._service.admission.is_draining = True
            self._shutdown_requested_at = self._failed_at = monotonic()
            self.exit_status = 1
