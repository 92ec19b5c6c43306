"""High-priority requests that fill the server, low-priority ones beside them, and their order.

The queue's promise: with an aging rate of r classes a second, a request of class LOW (2) is never
overtaken by one of class HIGH (0) that arrives more than 2 / r seconds after it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from scripts.server_process import Address
from scripts.soak.client import CHAT, Outcome, ask

# Classes between HIGH and LOW.
_DISTANCE: Final = 2
# Seconds.  First tokens of the same step come together, in any order.
_SAME_STEP: Final = 0.05


@dataclass(frozen=True, slots=True)
class Race:
    """The outcomes by priority; every request has a complete response."""

    high: Sequence[Outcome]
    low: Sequence[Outcome]


def request(number: int, priority: str, max_tokens: int) -> dict[str, Any]:
    """Return a stream; all prompts are alike in length, so that prefill takes each as long."""
    return {
        "messages": [{"role": "user", "content": f"{number:06}: count from there."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "priority": priority,
    }


async def race(
    address: Address, *, num_low: int, num_clients: int, num_slots: int, max_tokens: int = 8
) -> Race:
    """Send low requests, one after another, while more clients than slots send high ones.

    The first low one is sent once high ones queue up, and the next when it has begun; the clients
    of high priority go on until the last low one has ended.
    """
    high: list[Outcome] = []
    is_over = False
    is_busy = asyncio.Event()
    numbers = iter(range(1_000_000))

    async def send_high() -> None:
        while not is_over:
            high.append(await ask(address, CHAT, request(next(numbers), "high", max_tokens)))
            if len(high) >= num_slots:
                is_busy.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(send_high())
        await is_busy.wait()
        low = [
            await ask(address, CHAT, request(next(numbers), "low", max_tokens))
            for _ in range(num_low)
        ]
        is_over = True
    return Race(high, low)


def overtakers(race: Race, low: Outcome) -> list[Outcome]:
    """Return the high requests that were sent after a low one was admitted, and began before."""
    assert low.taken is not None
    assert low.first_token is not None
    return [
        high
        for high in race.high
        if high.sent > low.taken
        and high.first_token is not None
        and high.first_token < low.first_token - _SAME_STEP
    ]


def violations(race: Race, aging_rate: float) -> list[str]:
    """Return the high requests that overtook a low one though they came too late for that.

    No error of measurement counts: a stream's head comes after its request was queued, and a
    request is queued after it was sent.
    """
    bound = _DISTANCE / aging_rate
    return [
        f"sent {high.sent - low.taken:.3f} s after it, began before; the bound is {bound:g} s"
        for low in race.low
        for high in overtakers(race, low)
        if low.taken is not None and high.sent > low.taken + bound
    ]
