"""The program of a sandboxed process, which may die of its work: answers each line with a line.

`batching.sandbox.sandbox` runs this file with the file of a worker, whose function `answer` it calls.  Neither
may import anything of the project, which would take seconds.
"""

import importlib.util
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import process_time
from types import ModuleType
from typing import IO, Final

Answer = Callable[[bytes], bytes]
SetLimit = Callable[[int, tuple[int, int]], None]

# A terminal and a supervisor signal all processes, and the server has requests to finish.
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def load(file: str) -> ModuleType:
    """Import the file of a worker, and all that it imports at its first use: later, no file can be opened."""
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    getattr(worker, "prepare", lambda: None)()
    return worker


def limit_process(memory_bytes: int, set_limit: SetLimit = resource.setrlimit) -> None:
    """Limit this process, where the system knows such a limit; else the wall clock remains."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        # Open files stay open.  No other file, and no connection, can be opened, even in place of a closed one.
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, amount in limits.items():
        with suppress(ValueError, OSError):
            set_limit(kind, (amount, amount))


def limit_cpu(seconds: int, set_limit: SetLimit = resource.setrlimit) -> None:
    """Limit the seconds of a core from now on.

    At the soft limit the process ends by a signal of its own, which tells it from one that was killed; it may be
    raised again.
    """
    with suppress(ValueError, OSError):
        all_seconds = int(process_time()) + 1 + seconds
        set_limit(resource.RLIMIT_CPU, (all_seconds, resource.RLIM_INFINITY))


def answer_lines(
    lines: IO[bytes], answers: IO[bytes], answer: Answer, limit: Callable[[], None]
) -> None:
    """Answer each line until there are no more."""
    for line in lines:
        limit()
        answers.write(answer(line) + b"\n")
        answers.flush()


def main(file: str, cpu_seconds: int, memory_bytes: int, stack_bytes: int) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    worker = load(file)
    with open(0, "rb") as lines, open(0, "wb", closefd=False) as answers:

        def serve() -> None:
            limit_process(memory_bytes)
            try:
                # An empty line says that the process is ready.
                answers.write(b"\n")
                answers.flush()
                answer_lines(lines, answers, worker.answer, partial(limit_cpu, cpu_seconds))
            finally:
                # The socket must not be closed before: who sees that kills the process.
                os._exit(1)

        # 0 is the system's default.
        threading.stack_size(stack_bytes)
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
