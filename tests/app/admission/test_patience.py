"""Room that is there a moment later."""

import asyncio

import pytest

from app.admission.patience import after_departures
from app.http.errors.rejections import QueueFull

pytestmark = pytest.mark.anyio


async def test_room_that_a_departed_client_leaves_is_taken() -> None:
    """Its request lets go in a later turn of the event loop."""
    places: list[str] = []

    async def leave() -> None:
        await asyncio.sleep(0)
        places.append("free")

    def take() -> str:
        if not places:
            raise QueueFull("no place", 1)
        return places.pop()

    leaving = asyncio.create_task(leave())
    assert await after_departures(take) == "free"
    await leaving


async def test_without_room_it_is_rejected() -> None:
    calls: list[None] = []

    def take() -> None:
        calls.append(None)
        raise QueueFull("no place", 1)

    with pytest.raises(QueueFull):
        await after_departures(take)
    assert len(calls) > 1
