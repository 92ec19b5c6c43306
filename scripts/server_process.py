"""Servers as processes: any command for the benchmark, and this project's server for all others."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic, sleep
from typing import Any, Final, NamedTuple, Self

ROOT: Final = Path(__file__).parent.parent
MODEL: Final = "smollm2-135m-instruct"
_PREFIX: Final = "MLX_SERVER_"

# Seconds: for a start on a busy machine, and for an end that waits for requests in flight.
_START_TIMEOUT: Final = 120.0
_STOP_TIMEOUT: Final = 90.0
_POLL_INTERVAL: Final = 0.02


class ServerFailed(Exception):
    """A server does not start or does not respond; the text says why, with its log."""


class Address(NamedTuple):
    host: str
    port: int


class ServerProcess:
    """A command in a process group of its own, so that its children pause and end with it.

    What it writes goes to a file, so it never waits for a reader.  Ctrl-C at the terminal does not
    reach it: leaving the context kills it.  `stop` and `kill` may be called in any state.

    output: the file, to which it is appended; without it, one that ends with the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        output: Path | None = None,
        stderr: int = subprocess.STDOUT,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self._log = ""
        self._output = output.open("ab+") if output else TemporaryFile()  # noqa: SIM115 - `wait` closes it
        self._log_start = os.fstat(self._output.fileno()).st_size
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=stderr,
                preexec_fn=preexec,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise ServerFailed(f"{command[0]} cannot be started: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """All that it has written."""
        if self._output.closed:
            return self._log
        output = self._output.fileno()
        # Not with `seek`, which would move the position at which the process writes.
        size = os.fstat(output).st_size - self._log_start
        return os.pread(output, size, self._log_start).decode(errors="replace")

    def wait_for_line(self, pattern: str, timeout: float = _START_TIMEOUT) -> re.Match[str]:
        """Wait until the log has a line with a pattern.

        Raises:
            ServerFailed: it ended or took too long.
        """
        deadline = monotonic() + timeout
        while True:
            is_last_look = self.exit_status is not None or monotonic() > deadline
            if found := re.search(pattern, self.log, re.MULTILINE):
                return found
            if is_last_look:
                raise ServerFailed(f"no {pattern!r} in the log:\n{self.log}")
            sleep(_POLL_INTERVAL)

    def send_signal(self, number: int) -> None:
        # Once the process is reaped, another one may have its number.
        if self.exit_status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def pause(self) -> None:
        """Take the CPU away from it: an idle server may still poll or keep threads busy."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end, as an operator does."""
        self.resume()  # a paused process takes no other signal
        self.send_signal(signal.SIGTERM)

    def stop(self, timeout: float = _STOP_TIMEOUT) -> int:
        """Ask it to end, and kill it after a while; return its exit status."""
        self.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        finally:
            status = self.kill()
        return status

    def kill(self) -> int:
        """End it as a crash would; return its exit status, which is its own if it has ended."""
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        status = self._process.wait(_STOP_TIMEOUT)
        self._log = self.log
        self._output.close()
        return status


class Server(ServerProcess):
    """`python -m app` on a free port, with the settings given and no others.

    `settings` are variables without their prefix.  What the server stores ends with it.
    """

    def __init__(
        self,
        command: Sequence[str] = ("-m", "app"),
        *,
        python: str = sys.executable,
        stderr: int = subprocess.STDOUT,
        preexec: Callable[[], None] | None = None,
        **settings: str,
    ) -> None:
        self._data = TemporaryDirectory()
        environment = server_environment({"data_dir": self._data.name} | settings)
        super().__init__([python, *command], environment, stderr=stderr, preexec=preexec)

    def wait(self) -> int:
        status = super().wait()
        self._data.cleanup()
        return status

    def address(self) -> Address:
        """Wait until the server listens; return where."""
        found = self.wait_for_line(r"curl http://([^/]+):(\d+)/v1")
        return Address(found[1], int(found[2]))

    @property
    def url(self) -> str:
        host, port = self.address()
        return f"http://{host}:{port}"


def environment_settings() -> dict[str, Any]:
    """Return the MLX_SERVER_* variables of the environment as keyword arguments of `Server`."""
    # `Any` because `Server` has parameters of other types beside its settings.
    return {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(_PREFIX)
    }


def server_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server with the settings given, by names as `Server` takes them."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIX)}
    named = {f"{_PREFIX}{name.upper()}": value for name, value in settings.items()}
    return inherited | {f"{_PREFIX}PORT": "0", f"{_PREFIX}DEVICE": "cpu"} | named


def num_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Poll until a condition holds.

    Raises:
        TimeoutError: it does not within `timeout` seconds; `what` says what is the case instead.
    """
    deadline = monotonic() + timeout
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(what)
        sleep(_POLL_INTERVAL)
