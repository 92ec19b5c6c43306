"""What is measured: points of load, each a closed loop of clients or an open loop of arrivals."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from scripts.bench.load.client import Messages, RequestRecord
from scripts.bench.load.metrics import Values
from scripts.bench.load.scenarios import Scenario
from scripts.bench.load.workload import Conversation

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
    """Let each client ask as soon as its last completion has ended."""

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
    """Start a conversation after each gap, however many are in flight.

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


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each client waits for its completion before it asks again."""

    num_clients: int
    requests_per_client: int

    @property
    def label(self) -> str:
        return f"{self.num_clients} client{'s'[: self.num_clients > 1]}"

    @property
    def num_requests(self) -> int:
        return self.num_clients * self.requests_per_client

    def serve(self, scenario: Scenario, run: str, ask: Ask) -> Awaitable[list[RequestRecord]]:
        clients = [
            scenario.conversations(run, client, self.requests_per_client)
            for client in range(self.num_clients)
        ]
        return closed_loop(clients, ask)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Conversations begin at random moments, `rate` a second, whether others wait or not."""

    rate: float
    num_requests: int

    @property
    def label(self) -> str:
        return f"{self.rate:g} arrivals/s"

    def serve(self, scenario: Scenario, run: str, ask: Ask) -> Awaitable[list[RequestRecord]]:
        conversations = scenario.conversations(run, 0, self.num_requests)
        return open_loop(conversations, poisson_gaps(self.rate, run), ask)


@dataclass(frozen=True, slots=True)
class Point:
    """One load that every server gets in every round."""

    scenario: Scenario
    arrivals: ClosedLoop | OpenLoop
    max_tokens: int

    @property
    def title(self) -> str:
        return f"{self.scenario.name}, {self.arrivals.label}"

    def run_name(self, seed: int, number: int) -> str:
        """Name a round, and by that its texts: alike for all servers, new in each round."""
        return f"{seed}/{self.title}/{number}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The points with what they have in common; times are in seconds, limits in milliseconds."""

    points: tuple[Point, ...]
    rounds: int
    num_warmup_requests: int
    seed: int
    timeout: float
    time_limit: float
    ignores_eos: bool
    limits: Values | None

    @property
    def num_requests(self) -> int:
        """The requests that one server gets."""
        return self.rounds * sum(point.arrivals.num_requests for point in self.points)
