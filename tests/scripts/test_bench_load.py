import asyncio

import pytest

from scripts.bench.load.client import Messages, RequestRecord
from scripts.bench.load.plan import closed_loop, converse
from scripts.bench.load.workload import Conversation

pytestmark = pytest.mark.anyio


def record(text: str = "yes", error: str | None = None) -> RequestRecord:
    return RequestRecord(sent=0, ended=1, text=text, error=error)


async def test_a_closed_loop_keeps_each_client_busy_and_no_more() -> None:
    num_clients, num_each = 3, 4
    # Opens only if all clients are under way at once; a slower loop would hang here.
    barrier = asyncio.Barrier(num_clients)
    in_flight = []

    async def ask(messages: Messages) -> RequestRecord:
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

    async def ask(messages: Messages) -> RequestRecord:
        sent.append(messages)
        return record(f"answer {len(sent)}")

    await converse(Conversation(("first", "second"), system="be brief"), ask)
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": "first"}
    answer = {"role": "assistant", "content": "answer 1"}
    second = {"role": "user", "content": "second"}
    assert sent == [(system, first), (system, first, answer, second)]


async def test_a_failed_turn_is_the_last_one() -> None:
    async def ask(messages: Messages) -> RequestRecord:
        return record(error="lost") if len(messages) == 3 else record()

    records = await converse(Conversation(("first", "second", "third")), ask)
    assert [record.error for record in records] == [None, "lost"]
