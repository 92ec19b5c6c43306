"""What the tests of a live server share: golden requests, and what the server must be like after.

The server has a small model, and what that answers alone is golden.
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from itertools import cycle, islice
from typing import Any, Final

from scripts.server_process import Address, Server, num_open_files, wait_until
from scripts.soak.client import CHAT, Outcome, ask_all, get
from scripts.soak.gauges import held
from tests.support.small_model import Case, cases, small_model

# Settings of the shared server: a short queue and quick aging.
MAX_QUEUED: Final = 64
AGING_RATE: Final = 2.0


def live_server(command: Sequence[str] = ("-m", "app"), **settings: Any) -> Server:
    """Start a server of the small model, whose answers are exactly those of the model alone."""
    return Server(command, model=str(small_model()), cpu_precision="exact", **settings)


def golden_request(case: Case, **fields: Any) -> dict[str, Any]:
    return {
        "messages": case.messages,
        "temperature": 0,
        "max_tokens": case.num_tokens,
        "stream": True,
        **fields,
    }


def golden_cases(num_cases: int) -> list[Case]:
    """Return so many cases, the same ones again and again."""
    return list(islice(cycle(cases()), num_cases))


def strange(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is not the whole golden answer."""
    return [
        f"{case.messages}: {outcome} {outcome.text!r}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if not outcome.is_complete or outcome.text != case.text
    ]


async def ask_golden(address: Address, num_requests: int = 3) -> list[str]:
    """Ask golden requests all at once; return what was strange."""
    asked = golden_cases(num_requests)
    return strange(asked, await ask_all(address, CHAT, [golden_request(case) for case in asked]))


async def status_of(address: Address, path: str) -> int | None:
    return (await get(address, path)).status


def warm_up(server: Server) -> Server:
    """Wait until a server has answered, so that it has opened what it keeps open."""
    address = server.address()
    assert asyncio.run(ask_golden(address)) == []
    # For its first grammar it starts a process.
    json_object = golden_request(golden_cases(1)[0], response_format={"type": "json_object"})
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
