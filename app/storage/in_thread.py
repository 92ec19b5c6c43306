"""Runs blocking functions in a worker thread, to their end."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a worker thread; if the caller is cancelled, it still waits for the function.

    A thread cannot be interrupted: without waiting, a cancelled task would seem to have ended while the
    thread still writes.
    """
    work = asyncio.ensure_future(anyio.to_thread.run_sync(function))
    # A scope of anyio would cancel again what waits.
    with anyio.CancelScope(shield=True):
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            work.exception()
            raise
