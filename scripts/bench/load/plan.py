"""What is measured: points of load, each a closed loop of clients."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from scripts.bench.load.client import Messages, RequestRecord
from scripts.bench.load.scenarios import Scenario
from scripts.bench.load.workload import Conversation

# Whatever goes wrong is in the record.
Ask = Callable[[Messages], Awaitable[RequestRecord]]


async def converse(conversation: Conversation, ask: Ask) -> list[RequestRecord]:
    """Ask turn by turn with all that was said before; a failed turn is the last one."""
    messages: list[dict[str, str]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    records = []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        record = await ask(tuple(messages))
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
class Point:
    """One load that every server gets in every round."""

    scenario: Scenario
    arrivals: ClosedLoop
    max_tokens: int

    @property
    def title(self) -> str:
        return f"{self.scenario.name}, {self.arrivals.label}"

    def run_name(self, seed: int, number: int) -> str:
        """Name a round, and by that its texts: alike for all servers, new in each round."""
        return f"{seed}/{self.title}/{number}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The points with what they have in common; times are in seconds."""

    points: tuple[Point, ...]
    rounds: int
    num_warmup_requests: int
    seed: int
    timeout: float
    ignores_eos: bool

    @property
    def num_requests(self) -> int:
        """The requests that one server gets."""
        return self.rounds * sum(point.arrivals.num_requests for point in self.points)
