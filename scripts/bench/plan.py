"""What will be measured: points of load, how often, and within which bounds."""

from collections.abc import Awaitable
from dataclasses import dataclass

from scripts.bench.load import Ask, closed_loop, open_loop, poisson_gaps
from scripts.bench.metrics import Values
from scripts.bench.records import RequestRecord
from scripts.bench.scenarios import Scenario


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each client waits for its answer before it asks again."""

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


Arrivals = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Point:
    """One load that every server gets in every round."""

    scenario: Scenario
    arrivals: Arrivals
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
    limits: Values | None

    @property
    def num_requests(self) -> int:
        """The requests that one server gets."""
        return self.rounds * sum(point.arrivals.num_requests for point in self.points)
