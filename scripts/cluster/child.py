"""A process of a cluster."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, Self

from scripts.cluster.ports import HOST, free_port
from scripts.server_process import ServerFailed, ServerProcess, wait_until

_START_TIMEOUT: Final = 120.0


class Child(ABC):
    """A process on a port that stays its own when it is started again; leaving the context kills it.

    log: the file to which each run appends what it writes.

    All but `wait_until_ready` may be called in any state.
    """

    def __init__(self, port: int | None, log: Path) -> None:
        self.port: Final = port or free_port()
        self.url: Final = f"http://{HOST}:{self.port}"
        self.log: Final = log
        self._environment: dict[str, str] = {**os.environ}
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process and self.is_running else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status is None

    @property
    def exit_status(self) -> int | None:
        """Of its last run; None while it runs and before the first one."""
        return self._process.exit_status if self._process else None

    def start(self) -> None:
        """Start it, unless it runs; `wait_until_ready` says when it takes requests."""
        if self.is_running:
            return
        self.kill()  # what remains of its last run
        self._process = ServerProcess(self._command(), self._environment, output=self.log)

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command, with the files that it needs written."""

    def wait_until_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            ServerFailed: it has ended; the text has what it wrote.
            TimeoutError: it takes too long.
        """
        wait_until(self.has_started, f"{self.url} is not ready: {self.log}", _START_TIMEOUT)

    def has_started(self) -> bool:
        """Return whether it takes requests.

        Raises:
            ServerFailed: it has ended; the text has what it wrote.
        """
        if self._process is not None and not self.is_running:
            log = self._process.log.strip()
            raise ServerFailed(f"{self.log.stem}: {log or f'ended with {self.exit_status}'}")
        return self.is_ready()

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether it takes requests now."""

    def stop(self) -> int | None:
        """Ask it to end, and wait; return its exit status, None if it never ran."""
        return self._process.stop() if self._process else None

    def terminate(self) -> None:
        """Ask it to end, and do not wait."""
        if self._process:
            self._process.terminate()

    def kill(self) -> int | None:
        """End it as a crash would; return its exit status, None if it never ran."""
        return self._process.kill() if self._process else None

    def pause(self) -> None:
        if self._process:
            self._process.pause()

    def resume(self) -> None:
        if self._process:
            self._process.resume()
