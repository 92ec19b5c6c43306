"""Runs blocking functions in a worker thread, to their end."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

import anyio

T = TypeVar("T")

# Long work: it yields wherever it may be interrupted, and returns its result.
Pieces = Generator[None, None, T]


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a worker thread; if the caller is cancelled, it still waits for the function.

    A thread cannot be interrupted: without waiting, a cancelled task would seem to have ended while the
    thread still writes.
    """
    work = asyncio.ensure_future(anyio.to_thread.run_sync(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # A scope of anyio that is cancelled would cancel this wait, too.
        with anyio.CancelScope(shield=True):
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
        work.exception()
        raise


async def in_pieces(
    pieces: Pieces[T], turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
) -> T:
    """Run a generator in worker threads, piece by piece; a caller that is cancelled waits for one piece.

    turn: entered for each piece, so that others get theirs in between.
    """
    done = None
    try:
        while done is None:
            async with turn():
                done = await in_thread(partial(_run_piece, pieces))
    finally:
        pieces.close()
    return done[0]


def _run_piece(pieces: Pieces[T]) -> tuple[T] | None:
    """Run the next piece; return the result if it was the last one.

    It is in a tuple, as it may be None.
    """
    try:
        next(pieces)
    except StopIteration as end:
        return (end.value,)
    return None
