"""Far more requests than the server can serve, and what becomes of each."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final

from scripts.server_process import Address
from scripts.soak.client import CHAT, Outcome, ask

_PRIORITIES: Final = ("high", "normal", "low")
_MAX_TOKENS: Final = 8
_MAX_RETRY_AFTER: Final = 120


def request(number: int, *, max_tokens: int = _MAX_TOKENS) -> dict[str, Any]:
    """Return a short request of its own; classes, streams and whole responses take turns."""
    return {
        "messages": [{"role": "user", "content": f"{number}: say something about this number."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": number % 2 == 0,
        "priority": _PRIORITIES[number % len(_PRIORITIES)],
    }


async def measure_capacity(
    address: Address, *, num_requests: int, at_once: int, max_tokens: int = _MAX_TOKENS
) -> float:
    """Return how many requests the server ends in a second, with as many at once as it serves."""
    numbers = iter(range(num_requests))
    began = monotonic()

    async def client() -> None:
        for number in numbers:
            outcome = await ask(address, CHAT, request(-1 - number, max_tokens=max_tokens))
            assert outcome.is_complete, f"a server that is not overloaded completes, not: {outcome}"

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return num_requests / (monotonic() - began)


async def flood(
    address: Address, *, num_requests: int, rate: float, max_tokens: int = _MAX_TOKENS
) -> list[Outcome]:
    """Send requests at a constant rate, however many are under way, and wait for all ends."""
    began = monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(num_requests):
            await asyncio.sleep(began + number / rate - monotonic())
            body = request(number, max_tokens=max_tokens)
            tasks.append(group.create_task(ask(address, CHAT, body)))
    return [task.result() for task in tasks]


def counts(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """Return how many requests ended in which way."""
    return Counter(
        str(outcome.status) if outcome.broken is None else outcome.broken for outcome in outcomes
    )


def faults(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what was not as it should be: an end in silence, or a rejection without a time."""
    return [f"{fault}: {o}" for o in outcomes if (fault := _fault(o)) is not None]


def _fault(outcome: Outcome) -> str | None:
    if outcome.broken is not None:
        return "the connection broke"
    if outcome.status == 200:
        return None if outcome.is_complete else "an admitted request was not completed"
    if outcome.status not in (429, 503):
        return "another status than 200, 429 and 503"
    if outcome.error is None or not outcome.error.get("code"):
        return "a rejection without an error's envelope"
    retry_after = outcome.headers.get("retry-after", "")
    if not retry_after.isdecimal() or not 1 <= int(retry_after) <= _MAX_RETRY_AFTER:
        return f"Retry-After is {retry_after!r}"
    return None
