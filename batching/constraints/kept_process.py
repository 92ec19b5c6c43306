"""Processes for work that may take for ever: they are kept, and ended when they take too long.

A thread that computes cannot be ended, not even when its client has left.
"""

import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import BinaryIO, Final

from batching.interruption import Interrupted, interruptible

# On a machine so loaded that a process gets a tenth of a core.
WALL_SECONDS: Final = 20.0
# A process that took too much ends in another way: the limit of its time has a signal of its own.
_KILLS: Final = frozenset(
    {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
)


def was_killed(returncode: int | None) -> bool:
    """Return whether a process was ended by a supervisor, a terminal, or a system without memory; None never started."""
    return returncode is None or returncode in _KILLS


class KeptProcesses:
    """Asks processes of one program, in any thread.

    There are as many of them as threads that ask; the one that is kept is started by the first.

    file: the program, which reads lines from its standard input, a socket, and answers each with a line there.  It
        must not import anything of the project, which would take seconds.
    first: a line with its end, before all others, which has no answer.
    wall_seconds: after which a process is ended.
    """

    def __init__(
        self, file: str, first: bytes = b"", *, wall_seconds: float = WALL_SECONDS
    ) -> None:
        self._file = file
        self._first = first
        self._wall_seconds = wall_seconds
        self._free: Queue[_Process] = Queue(maxsize=1)

    def ask(self, line: bytes) -> bytes:
        """Return the answer to a line, both without their ends; blocking.

        Raises:
            OSError: there is no process, or it has ended, as it does if it takes too long.
            Interrupted: the caller has given up, so the process was ended.
        """
        process = self._running()
        answer = process.ask(line, self._wall_seconds)
        with suppress(Full):
            self._free.put_nowait(process)
        return answer

    def _running(self) -> "_Process":
        """Return a process that no other thread uses."""
        with suppress(Empty):
            if not (process := self._free.get_nowait()).has_ended:
                return process
        return _Process(self._file, self._first)


class _Process:
    """One process; it ends with this object."""

    def __init__(self, file: str, first: bytes) -> None:
        self._line, theirs = socket.socketpair()
        # -P: the modules beside the file must not hide the standard library's.
        command = [sys.executable, "-P", file]
        with theirs:
            try:
                # In a session of its own a terminal's signals are not for it.
                self._popen = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                self._line.close()
                raise
        self._answers = self._line.makefile("rb")
        self._end = weakref.finalize(self, _end, self._popen, self._line, self._answers)
        self._unsent = first

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def ask(self, line: bytes, timeout: float) -> bytes:
        unsent, self._unsent = self._unsent, b""
        try:
            with interruptible(partial(_kill, self._popen)):
                self._line.settimeout(timeout)
                self._line.sendall(unsent + line + b"\n")
                if not (answer := self._answers.readline()):
                    raise ConnectionError
        except (OSError, Interrupted):
            self._end()
            raise
        return answer.rstrip(b"\n")


def _end(popen: subprocess.Popen[bytes], line: socket.socket, answers: BinaryIO) -> None:
    """End a process, and its children."""
    # The socket is open as long as either is.
    answers.close()
    line.close()
    # Once it has been waited for, its number may be another's.
    if popen.poll() is None:
        _kill(popen)
        popen.wait()


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """Kill a process that was not waited for, and its children, which hold its end of the socket, too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
