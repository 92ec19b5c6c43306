"""Threads that have used MLX, which are used again and never end."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_idle: list["_ReusedThread"] = []


class _ReusedThread:
    """A thread that runs one function after the other.

    A thread that has used MLX must not return: its thread-local destructors take the GIL, and if the
    interpreter is about to finalize by then, that aborts the whole process.  MLX also keeps a stream of
    each thread for ever.  So a thread whose function has returned waits for the next one.
    """

    def __init__(self) -> None:
        self._functions: SimpleQueue[tuple[Callable[[], None], Callable[[], None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="mlx", daemon=True).start()

    def start(self, function: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._functions.put((function, on_end))

    def _run(self) -> None:
        while True:
            function, on_end = self._functions.get()
            try:
                function()
            except BaseException:
                logger.exception("the MLX thread")
            # It holds what it ran.
            del function
            with _lock:
                _idle.append(self)
            on_end()
            del on_end


def start_reused_thread(function: Callable[[], None], on_end: Callable[[], None]) -> None:
    """Run a function in a thread that runs nothing else meanwhile; then call `on_end`."""
    with _lock:
        thread = _idle.pop() if _idle else _ReusedThread()
    thread.start(function, on_end)
