"""The program of a sandboxed process, which may die of its work: answers each message with a message.

A message is its length and its bytes.  `batching.sandbox.sandbox` runs this file with the file of a worker, whose
function `answer` it calls, after `prepare` if it has that.  Neither file may import anything of the project, which
would take seconds.
"""

import importlib.util
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import process_time
from types import ModuleType
from typing import IO, Final

Answer = Callable[[bytes], bytes]
SetLimit = Callable[[int, tuple[int, int]], None]

# The length of a message, before its bytes.
LENGTH: Final = struct.Struct(">Q")

# A terminal and a supervisor signal all processes, and the server has requests to finish.
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def load(file: str, arguments: Sequence[str] = ()) -> ModuleType:
    """Import the file of a worker, and all that it imports at its first use: later, no file can be opened.

    arguments: those of `prepare`.
    """
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    getattr(worker, "prepare", lambda: None)(*arguments)
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


def received(messages: IO[bytes]) -> Iterator[bytes]:
    """Yield each message until there are no more."""
    while header := messages.read(LENGTH.size):
        yield messages.read(*LENGTH.unpack(header))


def send(answers: IO[bytes], answer: bytes) -> None:
    answers.write(LENGTH.pack(len(answer)))
    answers.write(answer)
    answers.flush()


def answer_messages(
    messages: IO[bytes], answers: IO[bytes], answer: Answer, limit: Callable[[], None]
) -> None:
    """Answer each message until there are no more."""
    for message in received(messages):
        limit()
        send(answers, answer(message))


def main(file: str, limits: Sequence[str], arguments: Sequence[str]) -> None:
    cpu_seconds, memory_bytes, stack_bytes = map(int, limits)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    worker = load(file, arguments)
    with open(0, "rb") as messages, open(0, "wb", closefd=False) as answers:

        def serve() -> None:
            limit_process(memory_bytes)
            try:
                # An empty message says that the process is ready.
                send(answers, b"")
                answer_messages(messages, answers, worker.answer, partial(limit_cpu, cpu_seconds))
            finally:
                # The socket must not be closed before: who sees that kills the process.
                os._exit(1)

        # 0 is the system's default.
        threading.stack_size(stack_bytes)
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:5], sys.argv[5:])
