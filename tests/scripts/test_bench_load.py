import asyncio
from itertools import islice, pairwise

import pytest

from scripts.bench.load.client import Messages, RequestRecord
from scripts.bench.load.plan import closed_loop, converse, open_loop, poisson_gaps
from scripts.bench.load.workload import Conversation

pytestmark = pytest.mark.anyio


def record(text: str = "yes", error: str | None = None) -> RequestRecord:
    return RequestRecord(sent=0, ended=1, text=text, error=error)


async def test_a_closed_loop_keeps_each_client_busy_and_no_more() -> None:
    num_clients, num_each = 3, 4
    # Opens only if all clients are under way at once; a slower loop would hang here.
    barrier = asyncio.Barrier(num_clients)
    in_flight = []

    async def ask(messages: Messages, priority: str | None) -> RequestRecord:
        in_flight.append(messages)
        assert len(in_flight) <= num_clients
        async with barrier:
            in_flight.remove(messages)
        return record(messages[0]["content"])

    clients = [
        [Conversation((f"{client}.{number}",)) for number in range(num_each)]
        for client in range(num_clients)
    ]
    records = await closed_loop(clients, ask)
    asked = [f"{client}.{number}" for client in range(num_clients) for number in range(num_each)]
    assert [record.text for record in records] == asked


async def test_a_turn_is_sent_with_all_that_was_said() -> None:
    sent: list[Messages] = []

    async def ask(messages: Messages, priority: str | None) -> RequestRecord:
        assert priority == "low"
        sent.append(messages)
        return record(f"answer {len(sent)}")

    await converse(Conversation(("first", "second"), system="be brief", priority="low"), ask)
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": "first"}
    answer = {"role": "assistant", "content": "answer 1"}
    second = {"role": "user", "content": "second"}
    assert sent == [(system, first), (system, first, answer, second)]


async def test_a_failed_turn_is_the_last_one() -> None:
    async def ask(messages: Messages, priority: str | None) -> RequestRecord:
        return record(error="lost") if len(messages) == 3 else record()

    records = await converse(Conversation(("first", "second", "third")), ask)
    assert [record.error for record in records] == [None, "lost"]


class FakeTime:
    """A clock that only sleep moves; each look at it costs a little."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        self.now += 0.125
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


async def test_an_open_loop_starts_at_points_in_time_whichever_wait() -> None:
    time = FakeTime()
    all_in_flight = asyncio.Barrier(3)

    async def ask(messages: Messages, priority: str | None) -> RequestRecord:
        # None ends before the last has begun.
        async with all_in_flight:
            return record(messages[0]["content"])

    conversations = [Conversation((text,)) for text in "abc"]
    gaps = iter([1.0, 0.0625, 2.0])
    records = await open_loop(conversations, gaps, ask, time.clock, time.sleep)
    assert [record.text for record in records] == ["a", "b", "c"]
    # The second arrival was due while the clock was read: it is late, the third is not.
    assert time.sleeps == [0.875, 0.0, 1.9375 - 0.125]


def test_arrivals_are_random_by_seed_and_right_on_average() -> None:
    gaps = list(islice(poisson_gaps(4.0, "seed"), 4000))
    assert gaps == list(islice(poisson_gaps(4.0, "seed"), 4000))
    assert gaps[:10] != list(islice(poisson_gaps(4.0, "other"), 10))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    # Exponential: no memory, so as much spread as mean, and neighbours that differ.
    variance = sum((gap - 1 / 4) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(1 / 4, rel=0.1)
    assert all(a != b for a, b in pairwise(gaps))
