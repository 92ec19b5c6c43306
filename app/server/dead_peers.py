"""Ends connections whose peer has vanished, by options of the kernel."""

import socket
from contextlib import suppress
from typing import Final

# Seconds.  An idle peer is probed, and its connection ends after three failed probes.
_KEEPALIVE_IDLE: Final = 30
_KEEPALIVE_INTERVAL: Final = 10
_KEEPALIVE_FAILURES: Final = 3
# With less, a few lost packets end the connection of a live peer.
_MIN_USER_TIMEOUT: Final = 10.0
# The kernel would buffer megabytes for a slow reader, which would hide its progress.
_MAX_UNSENT_BYTES: Final = 64 * 1024


def notice_dead_peers(sock: socket.socket, write_timeout: float) -> None:
    """Have the kernel end connections whose peer has vanished.

    The names of the options differ between systems.
    """
    options = {
        "TCP_KEEPIDLE": _KEEPALIVE_IDLE,
        "TCP_KEEPALIVE": _KEEPALIVE_IDLE,
        "TCP_KEEPINTVL": _KEEPALIVE_INTERVAL,
        "TCP_KEEPCNT": _KEEPALIVE_FAILURES,
        "TCP_USER_TIMEOUT": int(1000 * max(write_timeout, _MIN_USER_TIMEOUT)),
        "TCP_NOTSENT_LOWAT": _MAX_UNSENT_BYTES,
    }
    # macOS rejects options on a connection that its peer has reset.
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
