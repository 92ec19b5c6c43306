"""Renders the model's own chat template in other processes, which are kept.

The template is a program from a third party: it may loop for ever, or fill the memory with one
multiplication.  In a thread neither can be stopped; a process is killed, and the next request gets another.
It costs a tenth of a millisecond, and takes rendering off the interpreter's lock.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import LifoQueue
from time import monotonic
from typing import Any, Final

from app.http.errors.rejections import Unavailable
from app.prompts import template_process
from batching import interruptible, was_killed

# Of a core, for one rendering: what a template that exceeds them is at fault for.
_CPU_SECONDS: Final = 5
# Of the clock, without the wait for a process: on a machine in use a process gets less than a core.
_WALL_SECONDS: Final = 30.0
_NUM_PROCESSES: Final = 2
_READ_BYTES: Final = 1 << 18


class TemplateFailed(Exception):
    """A template failed in its process.

    kind: what happened, or the type of the exception.
    reason: the message of an exception that the template raised on purpose.
    """

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.reason = reason


class TemplateTooMuch(TemplateFailed):
    def __init__(self) -> None:
        super().__init__("it took too much time or memory")


class RendererLost(Unavailable):
    """The process that renders was killed or does not get on, which is no template's fault."""

    def __init__(self) -> None:
        super().__init__(
            "the process that renders chat templates was ended or has no time; try again",
            retry_after=1,
        )


class RenderProcess:
    """One process, started when it is needed; one thread at a time uses it."""

    def __init__(self, cpu_seconds: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> socket.socket:
        """Start the process unless it runs; return its end of the line."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self.stop()
        ours, theirs = socket.socketpair()
        self._socket = ours
        # -I: no variable of the environment and no module beside the file is taken notice of.
        command = [sys.executable, "-I", template_process.__file__, template_process.KEPT]
        # What it has to say on standard error may hold a part of a prompt.
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(self._cpu_seconds)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
            )
        return ours

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

    def ask(self, encoded: bytes, wall_seconds: float) -> bytes:
        """Return the answer to a line; a process that was killed is replaced once.

        Raises:
            TemplateTooMuch: the process has ended by itself, as at a limit.
            RendererLost: it was killed twice, or had no answer in time.
            Interrupted: the caller has given up, so it was killed.
        """
        deadline = monotonic() + wall_seconds
        with suppress(RendererLost):
            return self._ask(encoded, deadline)
        return self._ask(encoded, deadline)

    def _ask(self, encoded: bytes, deadline: float) -> bytes:
        try:
            seconds = _left(deadline)
            line = self.start()
            with interruptible(self._kill):
                line.settimeout(seconds)
                line.sendall(encoded + b"\n")
                return _line_of(line, deadline)
        except OSError:
            if was_killed(self.stop()):
                raise RendererLost from None
            raise TemplateTooMuch from None

    def _kill(self) -> None:
        # None at the end of the server.
        if (process := self._process) is not None:
            process.kill()


def _line_of(sock: socket.socket, deadline: float) -> bytes:
    """Return all that comes before the end of a line."""
    pieces: list[bytes] = []
    while not (pieces and pieces[-1].endswith(b"\n")):
        sock.settimeout(_left(deadline))
        if not (piece := sock.recv(_READ_BYTES)):
            raise ConnectionError("the process has ended")
        pieces.append(piece)
    return b"".join(pieces)


def _left(deadline: float) -> float:
    if (seconds := deadline - monotonic()) <= 0:
        raise TimeoutError
    return seconds


class RenderPool:
    """A few processes for all threads: the most cores that templates take from the model.

    cpu_seconds: of a core, for one rendering.
    wall_seconds: of the clock, from when it has a process.
    """

    def __init__(
        self,
        num_processes: int = _NUM_PROCESSES,
        *,
        cpu_seconds: int = _CPU_SECONDS,
        wall_seconds: float = _WALL_SECONDS,
    ) -> None:
        self._processes = [RenderProcess(cpu_seconds) for _ in range(num_processes)]
        self._wall_seconds = wall_seconds
        # The one used last is free first: it has compiled the template.
        self._free: LifoQueue[RenderProcess] = LifoQueue()
        for process in self._processes:
            self._free.put(process)

    def warm_up(self) -> None:
        """Start the processes before anything is rendered, and do not wait until they are ready."""
        for process in self._processes:
            process.start()

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for process in self._processes:
            process.stop()

    def render(
        self, template: str, turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Render a template; blocking, also until a process is free, which each is after a while.

        Raises:
            TemplateFailed: the template raises, or takes too much.
            RendererLost: the process was killed, or had no answer in time.
        """
        encoded = json.dumps([template, turns, variables], default=str).encode()
        process = self._free.get()
        try:
            answer = json.loads(process.ask(encoded, self._wall_seconds))
        finally:
            self._free.put(process)
        if "text" not in answer:
            raise TemplateFailed(answer["error"], answer["message"])
        return str(answer["text"])


POOL: Final = RenderPool()
atexit.register(POOL.close)
