"""Threads for the blocking work of requests, with waits that can be cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from app.turns import Turns
from batching import Interruption

T = TypeVar("T")


class WorkerThreads:
    """A few threads that are kept; what `run` waits for may be cancelled at any time.

    A cancelled `run` returns at once.  Work that has not begun never does; what has begun is interrupted
    where it waits for a process (`batching/sandbox/interruption.py`), and keeps its thread until it ends, so that
    there are never more of them.  anyio's threads either keep the caller until then, or are no longer
    counted.
    """

    def __init__(self, num_threads: int, *, per_key: int | None = None) -> None:
        """`per_key` is how many of the threads the work of one key may have; None is all."""
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="request")
        self._turns = Turns(lambda num_taken: num_taken < num_threads, max_of_key=per_key)

    async def run(self, function: Callable[[], T], key: str = "") -> T:
        """Call a blocking function in one of the threads.

        key: whose work it is; keys take turns.
        """
        await self._turns.acquire(key)
        interruption = Interruption()
        future = self._executor.submit(interruption.run, function)
        release = partial(self._turns.release, key)
        future.add_done_callback(partial(_call, asyncio.get_running_loop(), release))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            interruption.interrupt()
            raise


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None], _: Future[object]) -> None:
    with suppress(RuntimeError):  # the loop has been closed meanwhile
        loop.call_soon_threadsafe(callback)
