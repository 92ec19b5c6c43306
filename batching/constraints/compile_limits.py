"""Whether a grammar compiles within limits, found out in processes that are kept for it."""

import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Final

from batching.constraints import compile_process
from batching.constraints.compile_process import STATUS_BYTES, SpecialTokens, message

# On a machine so loaded that the process gets a tenth of a core.
_WALL_SECONDS: Final = 20.0
# Signals that no limit there sends: of a supervisor, a terminal, or a system without memory.
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class CompileInterrupted(Exception):
    """What became of the process says nothing of the grammar."""


class CompileLimits:
    """Tries the grammars of one vocabulary, in any thread.

    There are as many processes as threads that try one; the one that is kept is started by the
    first grammar.
    """

    def __init__(self, tokens: SpecialTokens, wall_seconds: float = _WALL_SECONDS) -> None:
        self._tokens = tokens
        self._wall_seconds = wall_seconds
        self._free: Queue[_Process] = Queue(maxsize=1)

    def allow(self, grammar: str) -> bool:
        """Return True if a grammar compiles, or is found to be invalid, within the limits; blocking.

        Raises:
            CompileInterrupted: the process was ended for another reason, or there was none.
        """
        try:
            process = self._running()
            status = process.exit_status(grammar, self._wall_seconds)
        except OSError:
            raise CompileInterrupted from None
        with suppress(Full):
            self._free.put_nowait(process)
        if -status in _FROM_OUTSIDE:
            raise CompileInterrupted
        return status == 0

    def _running(self) -> "_Process":
        """Return a process that no other thread uses."""
        with suppress(Empty):
            if not (process := self._free.get_nowait()).has_ended:
                return process
        return _Process(self._tokens)


class _Process:
    """A process of `compile_process`; it ends with this object."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._line, theirs = socket.socketpair()
        # -P: the modules beside the file must not hide the standard library's.
        command = [sys.executable, "-P", compile_process.__file__]
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
        self._end = weakref.finalize(self, _end, self._popen, self._line)
        self._unsent = message(tokens.encode())

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def exit_status(self, grammar: str, timeout: float) -> int:
        """Return that of a child that compiles a grammar, or the negative of the signal it died of.

        Raises:
            OSError: the process has ended, as it does if it takes longer than `timeout` seconds.
        """
        request = self._unsent + message(grammar.encode("utf-8", "surrogatepass"))
        self._unsent = b""
        try:
            self._line.settimeout(timeout)
            self._line.sendall(request)
            if not (answer := self._line.recv(STATUS_BYTES)):
                raise ConnectionError
        except OSError:
            self._end()
            raise
        return int.from_bytes(answer, "big", signed=True)


def _end(popen: subprocess.Popen[bytes], line: socket.socket) -> None:
    """End a process, and the child in which it compiles."""
    line.close()
    # Once it has been waited for, its number may be another's.
    if popen.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
