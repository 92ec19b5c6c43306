"""Patience before a rejection: the places of clients that have left are free a moment later."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from app.http.errors.rejections import QueueFull

T = TypeVar("T")

# Turns of the event loop in which it reads that clients have left, and their requests let go of what they hold.
_TURNS: Final = 8


async def after_departures(take: Callable[[], T]) -> T:
    """Call `take`, again if it raises QueueFull: a late loop reads requests before it reads who has left.

    Raises:
        QueueFull: there is no room either when all have let go.
    """
    for _ in range(_TURNS):
        try:
            return take()
        except QueueFull:
            await asyncio.sleep(0)
    return take()
