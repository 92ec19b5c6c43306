"""Writes that are waited for, whatever cancels the one who waits."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest

from app.storage.disk.in_thread import in_thread

pytestmark = pytest.mark.anyio


class Write:
    """A write in another thread, which ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = False

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(20), "it never ends"
        self.has_ended = True


async def by_a_task(write: Write) -> None:
    await in_thread(write)


async def by_a_scope(write: Write) -> None:
    """Cancel as anyio does: again and again, for as long as something in the scope waits."""

    async def cancel(scope: anyio.CancelScope) -> None:
        await asyncio.to_thread(write.begun.wait, 20)
        scope.cancel()

    with anyio.CancelScope() as scope:
        canceller = asyncio.create_task(cancel(scope))
        try:
            await in_thread(write)
        finally:
            assert write.has_ended, "it did not wait"
    await canceller


@pytest.mark.parametrize("waits", [by_a_task, by_a_scope])
async def test_a_cancelled_caller_waits_for_the_end(
    waits: Callable[[Write], Awaitable[None]],
) -> None:
    write = Write()

    async def wait() -> bool:
        with suppress(asyncio.CancelledError):
            await waits(write)
        return write.has_ended

    waiting = asyncio.create_task(wait())
    await asyncio.to_thread(write.begun.wait, 20)
    # Turns in which it could end, were it not for the thread.
    for _ in range(20):
        if waits is by_a_task:
            waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    write.may_end.set()
    assert await waiting


async def test_what_the_function_raises_is_raised() -> None:
    with pytest.raises(IndexError):
        await in_thread(list[None]().pop)
