"""Threads for the blocking work of requests, with waits that can be cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from batching import Interruption

T = TypeVar("T")


class WorkerThreads:
    """A few threads that are kept; what `run` waits for may be cancelled at any time.

    A cancelled `run` returns at once.  Work that has not begun never does; what has begun is interrupted
    where it waits for a process (`batching/interruption.py`), and keeps its thread until it ends, so that
    there are never more of them.  anyio's threads either keep the caller until then, or are no longer
    counted.
    """

    def __init__(self, num_threads: int, *, per_key: int | None = None) -> None:
        """`per_key` is how many of the threads the work of one key may have; None is all."""
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="request")
        self._per_key = per_key or num_threads
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, function: Callable[[], T], key: str = "") -> T:
        """Call a blocking function in one of the threads.

        key: whose work it is; the work of one key is done in order.
        """
        turn = self._turns.setdefault(key, asyncio.Semaphore(self._per_key))
        await turn.acquire()
        interruption = Interruption()
        future = self._executor.submit(interruption.run, function)
        # It also keeps the semaphore.
        future.add_done_callback(partial(_give_back, asyncio.get_running_loop(), turn))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            interruption.interrupt()
            raise


def _give_back(loop: asyncio.AbstractEventLoop, turn: asyncio.Semaphore, _: Future[object]) -> None:
    with suppress(RuntimeError):  # the loop has been closed meanwhile
        loop.call_soon_threadsafe(turn.release)
