"""Clients in parallel: a closed loop of patient ones, or an open loop of arrivals."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter

from scripts.bench.client import Messages
from scripts.bench.records import RequestRecord
from scripts.bench.workload import Conversation

# Messages and a priority go in; whatever goes wrong is in the record.
Ask = Callable[[Messages, str | None], Awaitable[RequestRecord]]


async def converse(conversation: Conversation, ask: Ask) -> list[RequestRecord]:
    """Ask turn by turn with all that was said before; a failed turn is the last one."""
    messages: list[dict[str, str]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    records = []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        record = await ask(tuple(messages), conversation.priority)
        records.append(record)
        if record.error is not None:
            break
        messages.append({"role": "assistant", "content": record.text})
    return records


async def closed_loop(clients: Sequence[Sequence[Conversation]], ask: Ask) -> list[RequestRecord]:
    """Let each client ask as soon as its last answer has ended."""

    async def client(conversations: Sequence[Conversation]) -> list[RequestRecord]:
        return [r for c in conversations for r in await converse(c, ask)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(conversations)) for conversations in clients]
    return [record for task in tasks for record in task.result()]


async def open_loop(
    conversations: Sequence[Conversation],
    gaps: Iterator[float],
    ask: Ask,
    clock: Callable[[], float] = perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[RequestRecord]:
    """Start a conversation after each gap, however many are under way.

    The arrivals are points in time: a late one does not delay those after it.
    """
    arrival = clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for conversation in conversations:
            arrival += next(gaps)
            await sleep(max(0.0, arrival - clock()))
            tasks.append(group.create_task(converse(conversation, ask)))
    return [record for task in tasks for record in task.result()]


def poisson_gaps(rate: float, seed: str) -> Iterator[float]:
    """Yield the seconds between arrivals of which there are `rate` a second on average."""
    rng = random.Random(seed)
    while True:
        yield rng.expovariate(rate)
