"""More requests than can be served: each one is answered or rejected in good form."""

import asyncio
from http import HTTPStatus

import pytest

from scripts.server_process import Address
from scripts.soak import overload
from scripts.soak.client import CHAT, Outcome, ask, get
from tests.support.live import MAX_QUEUED

pytestmark = pytest.mark.timeout(240)

SEATS = 8
# So many that clients are quicker to ask than the server is to answer.
NUM_TOKENS = 100


def test_under_overload_each_request_is_answered_or_rejected(address: Address) -> None:
    capacity = asyncio.run(
        overload.measure_capacity(address, num_requests=16, at_once=SEATS, max_tokens=NUM_TOKENS)
    )
    num_requests = 2 * (SEATS + MAX_QUEUED)

    async def flood() -> tuple[list[Outcome], set[int | None]]:
        """Return also what the server says of its health meanwhile."""
        flooding = asyncio.create_task(
            overload.flood(
                address, num_requests=num_requests, rate=10 * capacity, max_tokens=NUM_TOKENS
            )
        )
        statuses = set()
        while not flooding.done():
            statuses.add((await get(address, "/health")).status)
        return await flooding, statuses

    outcomes, statuses = asyncio.run(flood())
    assert overload.faults(outcomes) == []
    counts = overload.counts(outcomes)
    assert counts["200"] >= SEATS + MAX_QUEUED // 2
    assert counts["503"] > 0
    assert statuses == {HTTPStatus.OK}


def test_less_urgent_work_is_rejected_first(address: Address) -> None:
    """While there is no room for low and normal work, there still is some for high."""

    async def fill_and_try() -> tuple[list[Outcome], Outcome, Outcome, Outcome]:
        async with asyncio.TaskGroup() as group:
            waiting = [
                group.create_task(
                    # None is done before the next two are asked.
                    ask(
                        address,
                        CHAT,
                        overload.request(i, max_tokens=NUM_TOKENS) | {"priority": "normal"},
                    )
                )
                for i in range(SEATS + MAX_QUEUED)
            ]
            # The first rejection: by then there is no room for more of its class.
            rejected, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ready = await get(address, "/ready")
            high = await ask(
                address, CHAT, overload.request(-1, max_tokens=1) | {"priority": "high"}
            )
        return [task.result() for task in waiting], rejected.pop().result(), ready, high

    outcomes, first, ready, high = asyncio.run(fill_and_try())
    assert first.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert first.error is not None
    assert first.error["code"] == "queue_full"
    assert ready.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert high.is_complete, high
    assert overload.faults(outcomes) == []
