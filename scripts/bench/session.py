"""Measures all servers by a plan: point by point, round by round, one server after the other."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from scripts.bench.client import ChatClient, Messages
from scripts.bench.load import Ask, converse
from scripts.bench.metrics import Summary, medians, summarise
from scripts.bench.plan import Plan, Point
from scripts.bench.records import RequestRecord
from scripts.bench.servers import Server

# What servers say to a field that they do not take.
_REFUSALS: Final = (400, 422)
_PROBE_TOKENS: Final = 8
# Prompts that share nothing should find nothing; up to this share nobody needs to know.
_MAX_CACHED_SHARE: Final = 0.25


class Progress(Protocol):
    """Who wants to know how far the run is."""

    def begin(self, title: str, num_requests_before: int) -> None: ...

    def advance(self) -> None: ...


@dataclass(slots=True)
class Result:
    """One server at one point, round by round."""

    point: Point
    server: str
    rounds: list[Summary] = field(default_factory=list)
    records: list[list[RequestRecord]] = field(default_factory=list)

    def summary(self) -> Summary:
        return medians(self.rounds)


@dataclass(slots=True)
class Outcome:
    """All results in the order of the plan, and what a reader should know about them."""

    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_complete: bool = True

    @property
    def num_failed(self) -> int:
        return sum(summary.num_failed for result in self.results for summary in result.rounds)

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys(result.point for result in self.results))

    def summaries(self, point: Point) -> dict[str, Summary]:
        """Return the servers' numbers at a point, those of the first server first."""
        return {r.server: r.summary() for r in self.results if r.point == point}

    def add(
        self, point: Point, server: str, records: list[RequestRecord], summary: Summary
    ) -> Result:
        """Add a round to what is there of this server at this point."""
        for result in self.results:
            if result.point == point and result.server == server:
                break
        else:
            result = Result(point, server)
            self.results.append(result)
        result.records.append(records)
        result.rounds.append(summary)
        return result

    def note(self, text: str) -> None:
        """Say it once, however many rounds there are."""
        if text not in self.notes:
            self.notes.append(text)


async def run(plan: Plan, servers: Sequence[Server], progress: Progress) -> Outcome:
    """Measure; at the time limit, return what is complete by then."""
    session = _Session(plan, progress)
    try:
        async with asyncio.timeout(plan.time_limit):
            for point in plan.points:
                for number in range(plan.rounds):
                    for server in servers:
                        await session.measure(point, number, server)
    except TimeoutError:
        session.outcome.is_complete = False
        session.outcome.note(f"the time limit of {plan.time_limit:g} s ended the run early")
    return session.outcome


class _Session:
    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._progress = progress
        self._num_requests = 0
        self._takes_priority: dict[str, bool] = {}

    async def measure(self, point: Point, number: int, server: Server) -> None:
        """Give a server one round of a point's load."""
        title = f"round {number + 1}/{self._plan.rounds}  {point.title}  {server.name}"
        self._progress.begin(title, self._num_requests)
        with server.awake():
            records = await self._serve(point, number, server)
        self._num_requests += point.arrivals.num_requests
        summary = summarise(records, self._plan.limits)
        result = self.outcome.add(point, server.name, records, summary)
        self._note_oddities(result, server)

    async def _serve(self, point: Point, number: int, server: Server) -> list[RequestRecord]:
        run_name = point.run_name(self._plan.seed, number)
        # A new client each time: connections do not outlive a server's sleep.
        async with ChatClient(server.url, server.model, self._plan.timeout) as client:
            ask = await self._asker(client, point, server)
            warmup = (
                converse(point.scenario.conversations(f"{run_name}/warm-up", place, 1)[0], ask)
                for place in range(self._plan.num_warmup_requests)
            )
            await asyncio.gather(*warmup)
            return await point.arrivals.serve(point.scenario, run_name, self._telling(ask))

    async def _asker(self, client: ChatClient, point: Point, server: Server) -> Ask:
        sends_priority = point.scenario.has_priorities and await self._probe(client, server)

        async def ask(messages: Messages, priority: str | None) -> RequestRecord:
            sent = priority if sends_priority else None
            record = await client.ask(messages, point.max_tokens, sent)
            return replace(record, priority=priority)

        return ask

    def _telling(self, ask: Ask) -> Ask:
        async def ask_and_tell(messages: Messages, priority: str | None) -> RequestRecord:
            record = await ask(messages, priority)
            self._progress.advance()
            return record

        return ask_and_tell

    async def _probe(self, client: ChatClient, server: Server) -> bool:
        """True unless the server refuses a request for nothing but its priority."""
        if server.name not in self._takes_priority:
            hello = [{"role": "user", "content": "Say hello."}]
            with_field = await client.ask(hello, _PROBE_TOKENS, "normal")
            refused = with_field.status in _REFUSALS
            without = await client.ask(hello, _PROBE_TOKENS) if refused else with_field
            self._takes_priority[server.name] = not (refused and without.status == 200)
            if not self._takes_priority[server.name]:
                self.outcome.note(f"{server.name} refuses the field priority: sent without it")
        return self._takes_priority[server.name]

    def _note_oddities(self, result: Result, server: Server) -> None:
        name, values = server.name, result.rounds[-1].values
        if (obituary := server.obituary()) is not None:
            self.outcome.note(obituary)
        if values and "prompt_tokens" not in values:
            self.outcome.note(f"{name} sends no usage: its chunks are counted as tokens")
        share = values.get("cached_tokens", 0) / values.get("prompt_tokens", 1)
        scenario = result.point.scenario
        if share > _MAX_CACHED_SHARE and not scenario.shares_text:
            self.outcome.note(
                f"{name} had more than {_MAX_CACHED_SHARE:.0%} of the prompt tokens of "
                f"{scenario.name} in its cache: the beginning of its chat template, or a --seed that it saw before"
            )
