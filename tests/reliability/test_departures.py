"""Clients that come and leave in every way: the server forgets them, and serves the others."""

import asyncio

import pytest

from scripts.server_process import Address, Server, num_open_files, wait_until
from scripts.soak import overload
from scripts.soak.client import CHAT, ask_all
from scripts.soak.departures import LEAVINGS, storm
from scripts.soak.gauges import gauges, held
from scripts.soak.wire import Exchange, request_bytes
from tests.support.live import MAX_QUEUED, ask_golden, check_all_is_well

pytestmark = pytest.mark.timeout(240)

SEATS = 8


def test_clients_that_leave_at_any_point_leave_nothing_behind(server: Server) -> None:
    address = server.address()
    assert asyncio.run(ask_golden(address)) == []
    num_files = num_open_files(server.pid)
    num_before = asyncio.run(num_tokens_processed(address))
    left = asyncio.run(storm(address, 4 * len(LEAVINGS), seed=5))
    assert set(left.values()) == {4}
    check_all_is_well(server, num_files)
    # Had the engine gone on for them, it would have written 3000 for each of some thirty.
    assert asyncio.run(num_tokens_processed(address)) < num_before + 20_000
    assert asyncio.run(ask_for_every_place(address)) == []


async def num_tokens_processed(address: Address) -> float:
    """Return how many tokens the engine has read or written, for whomever."""
    return (await gauges(address))["vllm:iteration_tokens_total_sum"]


async def ask_for_every_place(address: Address) -> list[str]:
    """Send as many requests at once as there are places for; return what was not answered."""
    num_places = SEATS + MAX_QUEUED
    bodies = [overload.request(i, max_tokens=1) | {"priority": "high"} for i in range(num_places)]
    return [str(o) for o in await ask_all(address, CHAT, bodies) if not o.is_complete]


def test_a_client_that_takes_nothing_is_let_go(server: Server) -> None:
    address = server.address()
    num_files = num_open_files(server.pid)
    body = {
        "messages": [{"role": "user", "content": "Tell me all you know."}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 20,
    }

    def is_asked() -> bool:
        return any(asyncio.run(held(address)).values())

    def is_let_go() -> bool:
        return num_open_files(server.pid) <= num_files

    async def stay_without_reading() -> None:
        exchange = await Exchange.open(address, receive_buffer=1)
        exchange.pause()
        await exchange.send(request_bytes(CHAT, body))
        try:
            await asyncio.to_thread(wait_until, is_asked, "not connected")
            await asyncio.to_thread(wait_until, is_let_go, "not let go")
        finally:
            exchange.close()

    asyncio.run(stay_without_reading())
    check_all_is_well(server, num_files)
