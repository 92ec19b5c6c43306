"""Measures all servers by a plan: point by point, round by round, one server after the other."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Never

from tqdm import tqdm

from scripts.bench.load.client import ChatClient, Messages, RequestRecord
from scripts.bench.load.metrics import Summary, summarise
from scripts.bench.load.plan import Plan, Point, converse
from scripts.bench.load.servers import Target

# Prompts that share nothing should find nothing; beyond this share a note says so.
_MAX_CACHED_SHARE: Final = 0.25


@dataclass(slots=True)
class Outcome:
    """The summary of each round, by point and server in the order of the plan, with notes."""

    rounds: dict[Point, dict[str, list[Summary]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(
            summary.num_failed
            for by_server in self.rounds.values()
            for rounds in by_server.values()
            for summary in rounds
        )

    def add(self, point: Point, server: str, summary: Summary) -> None:
        self.rounds.setdefault(point, {}).setdefault(server, []).append(summary)

    def note(self, text: str) -> None:
        """Say it once, however many rounds there are."""
        if text not in self.notes:
            self.notes.append(text)


async def run(plan: Plan, targets: Sequence[Target]) -> Outcome:
    with tqdm(total=plan.num_requests * len(targets), file=sys.stderr, disable=None) as bar:
        session = _Session(plan, bar)
        for point in plan.points:
            for number in range(plan.rounds):
                for target in targets:
                    await session.measure(point, number, target)
    return session.outcome


class _Session:
    def __init__(self, plan: Plan, bar: "tqdm[Never]") -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._bar = bar

    async def measure(self, point: Point, number: int, target: Target) -> None:
        """Give a server one round of a point's load."""
        self._bar.set_description(
            f"round {number + 1}/{self._plan.rounds}, {point.title}, {target.name}"
        )
        with target.awake():
            records = await self._serve(point, number, target)
        summary = summarise(records)
        self.outcome.add(point, target.name, summary)
        self._note_oddities(point, target, summary)

    async def _serve(self, point: Point, number: int, target: Target) -> list[RequestRecord]:
        run_name = point.run_name(self._plan.seed, number)
        # A new client each time: connections do not outlive a server's pause.
        options = {"ignore_eos": True} if self._plan.ignores_eos else {}
        async with ChatClient(target.url, target.model, self._plan.timeout, options) as client:

            async def ask(messages: Messages) -> RequestRecord:
                return await client.ask(messages, point.max_tokens)

            warmup = (
                converse(
                    point.scenario.conversations(f"{run_name}/warm-up", client_number, 1)[0], ask
                )
                for client_number in range(self._plan.num_warmup_requests)
            )
            await asyncio.gather(*warmup)

            async def ask_and_count(messages: Messages) -> RequestRecord:
                record = await ask(messages)
                self._bar.update()
                return record

            return await point.arrivals.serve(point.scenario, run_name, ask_and_count)

    def _note_oddities(self, point: Point, target: Target, summary: Summary) -> None:
        values = summary.values
        if (end := target.premature_end()) is not None:
            self.outcome.note(end)
        if values and "prompt_tokens" not in values:
            self.outcome.note(f"{target.name} sends no usage: its chunks are counted as tokens")
        share = values.get("cached_tokens", 0) / values.get("prompt_tokens", 1)
        if share > _MAX_CACHED_SHARE and not point.scenario.shares_text:
            self.outcome.note(
                f"{target.name} had more than {_MAX_CACHED_SHARE:.0%} of the prompt tokens of "
                f"{point.scenario.name} in its cache: the beginning of its chat template, "
                "or a --seed that it has seen before"
            )
