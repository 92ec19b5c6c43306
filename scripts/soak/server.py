"""The server under test: a process of its own, whose log is read so that it never waits for us."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Final, Self

from scripts.soak.wire import Address

ROOT: Final = Path(__file__).parent.parent.parent
MODEL: Final = "smollm2-135m-instruct"

# Seconds: for a start on a busy machine, and for an end that waits for what runs.
_START_TIMEOUT: Final = 120.0
_STOP_TIMEOUT: Final = 90.0
# Seconds between two looks at what nobody tells us of.
_PACE: Final = 0.02


class NotServing(Exception):
    """The server did not start; its text is its log."""


class Server:
    """`python -m app`, with the settings given and no others; ended by `stop`, or killed at the end.

    `settings` are variables without their prefix.
    """

    def __init__(
        self,
        command: Sequence[str] = ("-m", "app"),
        *,
        stderr: int | None = None,
        preexec: Callable[[], None] | None = None,
        **settings: str,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=_environment(settings),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if stderr is None else stderr,
            preexec_fn=preexec,
            text=True,
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        if self._process.stderr is not None:
            threading.Thread(target=self._read_log, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        with self._news:
            return "".join(self._lines)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Wait until the log has a line with a pattern.

        Raises:
            NotServing: it will never have one.
        """
        with self._news:
            self._news.wait_for(
                lambda: self._has_ended or self._found(pattern), timeout=_START_TIMEOUT
            )
            if (found := self._found(pattern)) is None:
                raise NotServing("".join(self._lines))
            return found

    def address(self) -> Address:
        """Wait until the server listens; return where."""
        found = self.wait_for_line(r"curl http://([^/]+):(\d+)/v1")
        return Address(found[1], int(found[2]))

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """Ask it to end, as an operator does; return its exit status."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; return its exit status, with its log complete."""
        status = self._process.wait(_STOP_TIMEOUT)
        if self._process.stderr is not None:
            with self._news:
                self._news.wait_for(lambda: self._has_ended, timeout=_STOP_TIMEOUT)
        return status

    def kill(self) -> int:
        """End it as a crash would; return its exit status, which is its own if it has ended."""
        self._process.kill()
        return self._process.wait()

    def _found(self, pattern: str) -> re.Match[str] | None:
        return next((m for line in self._lines if (m := re.search(pattern, line))), None)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    named = {f"MLX_SERVER_{name.upper()}": value for name, value in settings.items()}
    return inherited | {"MLX_SERVER_PORT": "0", "MLX_SERVER_DEVICE": "cpu"} | named


def num_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Look again and again whether something has come about.

    Raises:
        TimeoutError: it has not within `timeout` seconds.
    """
    deadline = monotonic() + timeout
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(what)
        sleep(_PACE)
