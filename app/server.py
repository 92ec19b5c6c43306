"""The process: listening, and an end that lets open requests finish."""

import asyncio
import math
import signal
import socket
from typing import Final

import uvicorn
from fastapi import FastAPI

from batching import SchedulerManager

# Seconds after the deadline for the last step of the model and for the error events.
_LAST_WORDS: Final = 10


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
    app: FastAPI, sock: socket.socket, manager: SchedulerManager, shutdown_timeout: float
) -> None:
    """Answer requests until a signal; return when the open ones have finished or been ended.

    Raises:
        BindError: somebody else listens on the address since it was taken.
    """
    try:
        sock.listen()
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _bind_error(host, port, error) from None
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(shutdown_timeout) + _LAST_WORDS,
    )
    # uvicorn raises the signal again once it is done.  By then it has had its effect.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    _Server(config, manager, shutdown_timeout).run(sockets=[sock])


def _ignore(*_: object) -> None:
    """Do nothing; SIG_IGN would be inherited by child processes."""


class _Server(uvicorn.Server):
    """After the deadline, ends the engines: what still runs is told so and ends in good order."""

    def __init__(
        self, config: uvicorn.Config, manager: SchedulerManager, shutdown_timeout: float
    ) -> None:
        super().__init__(config)
        self._manager = manager
        self._shutdown_timeout = shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # close(0) asks the engines to end and does not wait for it.
        deadline = asyncio.get_running_loop().call_later(
            self._shutdown_timeout, self._manager.close, 0
        )
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
