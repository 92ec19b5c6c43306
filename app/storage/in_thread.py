"""Runs what blocks in a worker thread, to its end."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a worker thread; a caller that is cancelled waits for its end.

    A thread cannot be interrupted: without waiting for it, a cancelled task would seem to have ended,
    and what the thread writes would come later.
    """
    work = asyncio.ensure_future(anyio.to_thread.run_sync(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()
        raise
