"""Ports of this machine that stay a process's own while it is started again."""

import random
import socket
from itertools import cycle, islice
from typing import Final

HOST: Final = "127.0.0.1"
# For httpx: nothing here has any, and to read the system's takes a hundred times what a request takes.
NO_CERTIFICATES: Final = False

# Below those that systems hand to outgoing connections, of which one could take the port of a server that is down.
# A server's events are at a port 1,000 above its own, and their replays 2,000 above.
EVENTS: Final = 1_000
REPLAYS: Final = 2_000
_PORTS: Final = range(20_000, 20_000 + EVENTS)
# In turn, so that none is handed out twice before its first process listens.
_turns: Final = cycle(random.sample(_PORTS, len(_PORTS)))


class PortInUse(Exception):
    """Another process listens on the port."""

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} is in use")


def free_port() -> int:
    """Return a port on which nothing listens now."""
    return next(port for port in islice(_turns, len(_PORTS)) if is_free(port))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection that has just ended is in no one's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
