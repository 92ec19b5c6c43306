"""Keeps the threads of requests busy."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.worker_threads import WorkerThreads


@asynccontextmanager
async def busy(threads: WorkerThreads) -> AsyncIterator[None]:
    """Have all threads wait until the block ends."""
    all_wait = threading.Barrier(threads.num_threads + 1)
    has_ended = threading.Event()

    def wait() -> None:
        all_wait.wait(20)
        assert has_ended.wait(20), "the test does not end"

    async with asyncio.TaskGroup() as group:
        for _ in range(threads.num_threads):
            group.create_task(threads.run(wait))
        await asyncio.to_thread(all_wait.wait, 20)
        try:
            yield
        finally:
            has_ended.set()
