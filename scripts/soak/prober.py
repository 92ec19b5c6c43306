"""Asks a server ten times a second how it is, in a process of its own.

`python -m scripts.soak.prober HOST PORT PATH` prints the seconds that each response took, as JSON,
when its standard input ends; null stands for one that was not 200.
"""

import json
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Final, Self

from scripts.server_process import Address
from scripts.soak.wire import request_bytes

_INTERVAL: Final = 0.1
_TIMEOUT: Final = 30.0


class Prober:
    """The process, as the one that starts it sees it."""

    def __init__(self, address: Address, path: str = "/health") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.soak.prober", address.host, str(address.port), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def latencies(self) -> list[float | None]:
        """End it; return the seconds of each probe, None for one that found no good health."""
        output, _ = self._process.communicate()
        found: list[float | None] = json.loads(output)
        return found


def probe(address: Address, path: str) -> float | None:
    """Return how long a response took on a new connection; None if it is not 200."""
    began = monotonic()
    try:
        with socket.create_connection(address, timeout=_TIMEOUT) as sock:
            sock.sendall(request_bytes(path))
            response = b""
            while piece := sock.recv(4096):
                response += piece
    except OSError:
        return None
    return monotonic() - began if response.startswith(b"HTTP/1.1 200 ") else None


def main(words: Sequence[str]) -> None:
    host, port, path = words
    address = Address(host, int(port))
    due = monotonic()
    latencies = []
    while not select.select([sys.stdin], [], [], max(0.0, due - monotonic()))[0]:
        latencies.append(probe(address, path))
        # No burst after a response that took long.
        due = max(due + _INTERVAL, monotonic())
    print(json.dumps(latencies))


if __name__ == "__main__":
    main(sys.argv[1:])
