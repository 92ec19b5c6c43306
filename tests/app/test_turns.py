"""Keys that wait for the same: which one is next."""

import asyncio
from collections.abc import Sequence

import pytest

from app.turns import Turns

pytestmark = pytest.mark.anyio


async def order(turns: Turns, keys: Sequence[str], held: str) -> str:
    """Let keys wait for the slot that one holds; return them in the order in which they get it."""
    got: list[str] = []

    async def take(key: str) -> None:
        async with turns.turn(key):
            got.append(key)
            await asyncio.sleep(0)

    waiting = [asyncio.create_task(take(key)) for key in keys]
    await asyncio.sleep(0)
    turns.release(held)
    await asyncio.gather(*waiting)
    return "".join(got)


async def test_keys_alternate_however_many_wait_for_one() -> None:
    turns = Turns(lambda num_taken: num_taken < 1)
    await turns.acquire("a")
    assert await order(turns, "aaaaabbc", held="a") == "abcabaaa"
    assert turns.num_taken == 0


async def test_the_next_slot_is_for_the_key_that_has_the_fewest() -> None:
    turns = Turns(lambda num_taken: num_taken < 3)
    for key in "aab":
        await turns.acquire(key)
    waiting = {key: asyncio.create_task(turns.acquire(key)) for key in "abc"}
    for released, following in zip("abb", "cba", strict=True):
        await asyncio.sleep(0)
        assert not waiting[following].done()
        turns.release(released)
        await waiting[following]


async def test_one_that_no_longer_waits_leaves_its_turn_to_the_next() -> None:
    turns = Turns(lambda num_taken: num_taken < 1)
    await turns.acquire("a")
    waits, granted, last = (asyncio.create_task(turns.acquire(key)) for key in "bcd")
    await asyncio.sleep(0)
    waits.cancel()
    turns.release("a")
    # It has its turn, and is cancelled before it knows.
    granted.cancel()
    await last
    assert turns.num_taken == 1


async def test_a_key_has_no_more_than_its_limit_where_there_is_one() -> None:
    turns = Turns(lambda num_taken: num_taken < 3, max_of_key=1)
    await turns.acquire("a")
    second = asyncio.create_task(turns.acquire("a"))
    await asyncio.sleep(0)
    await turns.acquire("b")
    assert not second.done()
    turns.release("a")
    await second
    assert turns.num_taken == 2
