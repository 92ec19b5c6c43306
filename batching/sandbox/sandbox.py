"""Processes for work that may take for ever, fill the memory or crash: they have limits, and are replaced.

A thread that computes cannot be ended, not even when its client has left; a process can.  An answer of one that
is kept costs a tenth of a millisecond, and takes the work off the interpreter's lock.
"""

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from threading import Lock, Semaphore
from time import monotonic
from typing import Final

from batching.sandbox import child
from batching.sandbox.interruption import Interrupted, interruptible

# Processes for all threads that ask: the most cores that such work takes from the model.
_NUM_PROCESSES: Final = 2
# Seconds of the clock, without the wait for a process: on a machine so loaded that a process gets a tenth of a core.
_WALL_SECONDS: Final = 30.0
_READ_BYTES: Final = 1 << 18
# A process that took too much ends in another way: the limit of its time has a signal of its own.
_KILLS: Final = frozenset(
    {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
)


class SandboxExceeded(Exception):
    """The work has ended its process, as it does at a limit."""


class SandboxLost(Exception):
    """The process was killed, could not be started, or had no answer in time: no fault of the work."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of a process.

    cpu_seconds: seconds of a core for one answer.
    stack_bytes: 0 is the system's default.
    """

    cpu_seconds: int
    memory_bytes: int = 512 << 20
    stack_bytes: int = 0


class SandboxProcess:
    """One process, started when it is needed; one thread at a time uses it."""

    def __init__(self, worker: str, limits: SandboxLimits, arguments: Sequence[str] = ()) -> None:
        # -I: no variable of the environment and no module beside the file is taken notice of.
        command = [sys.executable, "-I", child.__file__, worker, *map(str, astuple(limits))]
        self._command = [*command, *arguments]
        # An answer that is longer was never in the process.
        self._max_bytes = limits.memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> socket.socket:
        """Start the process unless it runs; return the socket to it."""
        if self._socket is not None and self.is_running:
            return self._socket
        self.stop()
        self._is_ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # It may hold a part of a prompt.
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
                # A terminal's signals are not for it.
                start_new_session=True,
            )
        return self._socket

    def stop(self) -> int | None:
        """End the process if it runs; return its status, of which one that has ended already decides."""
        # Two threads may stop it, one of them at the end of the server.
        process, self._process = self._process, None
        sock, self._socket = self._socket, None
        if process is not None:
            process.kill()
            process.wait()
        if sock is not None:
            sock.close()
        return None if process is None else process.returncode

    def ask(self, message: bytes, wall_seconds: float) -> bytes:
        """Return the answer to a message; a process that was killed is replaced once.

        Raises:
            SandboxExceeded: the process has ended by itself, as at a limit.
            SandboxLost: it was killed twice, could not be started, or had no answer in time.
            Interrupted: the caller has given up, so it was killed.
        """
        deadline = monotonic() + wall_seconds
        with suppress(SandboxLost):
            return self._ask(message, deadline)
        return self._ask(message, deadline)

    def _ask(self, message: bytes, deadline: float) -> bytes:
        try:
            seconds = _left(deadline)
            sock = self.start()
            with interruptible(self._kill):
                sock.settimeout(seconds)
                if not self._is_ready:
                    self._is_ready = self._received(sock, deadline) == b""
                sock.sendall(child.LENGTH.pack(len(message)) + message)
                return self._received(sock, deadline)
        except Interrupted:
            self.stop()
            raise
        except OSError:
            status = self.stop()
            is_lost = status is None or status in _KILLS or not self._is_ready
            raise SandboxLost if is_lost else SandboxExceeded from None

    def _received(self, sock: socket.socket, deadline: float) -> bytes:
        (length,) = child.LENGTH.unpack(_received(sock, child.LENGTH.size, deadline))
        if length > self._max_bytes:
            self.stop()
            raise SandboxExceeded
        return _received(sock, length, deadline)

    def _kill(self) -> None:
        # None at the end of the server.
        if (process := self._process) is not None:
            process.kill()


def _received(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    pieces: list[bytes] = []
    while num_bytes:
        sock.settimeout(_left(deadline))
        if not (piece := sock.recv(min(num_bytes, _READ_BYTES))):
            raise ConnectionError("the process has ended")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _left(deadline: float) -> float:
    if (seconds := deadline - monotonic()) <= 0:
        raise TimeoutError
    return seconds


class Sandbox:
    """Asks a few processes of one program, in any thread; they end with this object.

    worker: the file of the program, as `child` describes.
    arguments: those of the worker's `prepare`.
    wall_seconds: seconds of the clock, from when a message has a process.
    num_kept: how many processes stay when they have answered.
    """

    def __init__(
        self,
        worker: str,
        limits: SandboxLimits,
        *,
        arguments: Sequence[str] = (),
        wall_seconds: float = _WALL_SECONDS,
        num_processes: int = _NUM_PROCESSES,
        num_kept: int = 1,
    ) -> None:
        self._wall_seconds = wall_seconds
        self._num_kept = num_kept
        self._processes = [SandboxProcess(worker, limits, arguments) for _ in range(num_processes)]
        # The last one is used first: it has what it made for the message before.
        self._free = list(self._processes)
        self._places = Semaphore(num_processes)
        self._lock = Lock()
        weakref.finalize(self, _stop, self._processes)

    def warm_up(self) -> None:
        """Start the processes before there is a message, and do not wait until they are ready."""
        for process in self._processes:
            process.start()

    def ask(self, message: bytes) -> bytes:
        """Return the answer to a message; blocking, also until a process is free, which each is after a while.

        Raises: as `SandboxProcess.ask`.
        """
        self._places.acquire()
        process = self._free.pop()
        try:
            return process.ask(message, self._wall_seconds)
        finally:
            self._give_back(process)
            self._places.release()

    def _give_back(self, process: SandboxProcess) -> None:
        with self._lock:
            if sum(other.is_running for other in self._free) < self._num_kept:
                self._free.append(process)
                return
            self._free.insert(0, process)
        process.stop()

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        _stop(self._processes)


def _stop(processes: Iterable[SandboxProcess]) -> None:
    for process in processes:
        process.stop()
