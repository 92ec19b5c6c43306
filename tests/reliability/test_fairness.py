"""Who is served first while urgent requests fill the server."""

import asyncio

import pytest

from scripts.server_process import Server
from scripts.soak import fairness
from tests.support.live import AGING_RATE

pytestmark = pytest.mark.timeout(240)


def test_no_request_is_overtaken_by_one_that_comes_later_than_the_bound(server: Server) -> None:
    """Clients of high priority go on until the low ones are served: without aging, for ever."""
    race = asyncio.run(
        fairness.race(server.address(), num_low=2, num_clients=16, num_slots=8, max_tokens=2)
    )
    assert [str(o) for o in (*race.high, *race.low) if not o.is_complete] == []
    assert fairness.violations(race, AGING_RATE) == []
