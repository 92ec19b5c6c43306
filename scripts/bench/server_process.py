"""A server that runs for the time of the benchmark."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

# Seconds.  Its requests are over or given up by then, so there is nothing to wait for.
_END_TIMEOUT: Final = 15.0
_LOG_TAIL: Final = 2000


class ServerFailed(Exception):
    """A server cannot be started or reached; the text is for the person at the terminal."""


class ServerProcess:
    """A command in a process group of its own, so that its children stop and end with it.

    The keyboard's Ctrl-C does not reach that group: whoever starts a server closes it.
    `close` may be called in any state and any number of times.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            self._popen = subprocess.Popen(
                command,
                env=os.environ | dict(environment or {}),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ServerFailed(f"{command[0]} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def log_tail(self) -> str:
        """Return the last that it wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode(errors="replace").strip()

    def pause(self) -> None:
        """Take the CPU away from it: an idle server may still poll or hold threads busy."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ask it to end, and insist after a while or at a second Ctrl-C."""
        # A stopped process takes no other signal.
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_END_TIMEOUT)
        finally:
            self._signal(signal.SIGKILL)
            self._popen.wait()
            self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped, the number may be somebody else's.
        if self._popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)
