"""What the tests of a live server share: golden requests, and what the server must be like after."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from scripts.server_process import Address, Server, num_open_files, wait_until
from scripts.soak.client import CHAT, Outcome, ask_all, get
from scripts.soak.gauges import held
from tests.support.golden import GOLDEN, GoldenCase

# Settings of the shared server: a short queue and quick aging.
MAX_QUEUED: Final = 64
AGING_RATE: Final = 2.0

# Those whose answers are short.
BRIEF: Final = tuple(case for case in GOLDEN if len(case.completion_token_ids) < 16)


def golden_request(case: GoldenCase, **fields: Any) -> dict[str, Any]:
    return {
        "messages": case.messages,
        "temperature": 0,
        "repetition_penalty": 1,
        "max_tokens": len(case.completion_token_ids),
        "stream": True,
        **fields,
    }


def brief_cases(num_cases: int) -> list[GoldenCase]:
    """Return so many cases, the same ones again and again."""
    return [BRIEF[i % len(BRIEF)] for i in range(num_cases)]


def strange(cases: Sequence[GoldenCase], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is not the whole golden answer."""
    return [
        f"{case.name}: {outcome} {outcome.text!r}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if not outcome.is_complete or outcome.text != case.text
    ]


async def ask_golden(address: Address, num_requests: int = len(BRIEF)) -> list[str]:
    """Ask golden requests all at once; return what was strange."""
    cases = brief_cases(num_requests)
    return strange(cases, await ask_all(address, CHAT, [golden_request(case) for case in cases]))


async def status_of(address: Address, path: str) -> int | None:
    return (await get(address, path)).status


def warm_up(server: Server) -> Server:
    """Wait until a server has answered, so that it has opened what it keeps open."""
    address = server.address()
    assert asyncio.run(ask_golden(address)) == []
    # For its first grammar it starts a process.
    json_object = golden_request(BRIEF[0], response_format={"type": "json_object"})
    (outcome,) = asyncio.run(ask_all(address, CHAT, [json_object]))
    assert outcome.is_complete
    return server


def check_all_is_well(server: Server, num_files: int) -> None:
    """Fail unless no request holds anything, all connections are closed, and answers are right."""
    address = server.address()

    def is_idle() -> bool:
        return not any(asyncio.run(held(address)).values())

    wait_until(is_idle, "requests or blocks are still held")
    wait_until(lambda: num_open_files(server.pid) <= num_files, "connections are still open")
    assert asyncio.run(ask_golden(address, 1)) == []
    assert asyncio.run(status_of(address, "/health")) == HTTPStatus.OK
    assert asyncio.run(status_of(address, "/ready")) == HTTPStatus.OK
