"""Who is served first while urgent requests fill the server."""

import asyncio

import pytest

from scripts.soak import fairness
from scripts.soak.server import Server
from tests.reliability.conftest import AGING_RATE

pytestmark = pytest.mark.timeout(240)


def test_nobody_is_overtaken_by_one_that_comes_later_than_the_bound(server: Server) -> None:
    race = asyncio.run(
        fairness.race(server.address(), num_low=2, num_clients=16, seats=8, max_tokens=2)
    )
    assert [str(o) for o in (*race.high, *race.low) if not o.is_complete] == []
    assert fairness.violations(race, AGING_RATE) == []
    # Urgency counts all the same, and the load would have kept the others waiting for ever.
    assert all(fairness.overtakers(race, low) for low in race.low)
    last = race.low[-1]
    assert last.taken is not None
    assert any(high.sent > last.taken + 2 / AGING_RATE for high in race.high)
