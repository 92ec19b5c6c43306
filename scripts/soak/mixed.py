"""A bit of everything that clients send, in a round that repeats: good, bad and given up."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from scripts.server_process import Address
from scripts.soak.client import CHAT, COMPLETIONS, Outcome, ask, get
from scripts.soak.departures import LEAVINGS

Visit = Callable[[Address, int], Awaitable[str | None]]

_SYSTEM: Final = " ".join(f"Rule {i}: be brief, be right, and be kind." for i in range(24))
_LONG: Final = " ".join(f"On day {i} it rained." for i in range(80))
_PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Tally:
    """How the requests ended; `faults` are those that did not end as they should."""

    num_requests: int = 0
    faults: list[str] = field(default_factory=list)


def chat(question: str, *, system: str | None = None, **fields: Any) -> dict[str, Any]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    return {"messages": messages, "temperature": 0, "max_tokens": 16, **fields}


def _person_schema(number: int) -> dict[str, Any]:
    """Return a schema that no other request has, so that its grammar is compiled again."""
    schema = {**_PERSON, "title": f"Person {number}"}
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number % 5}", "parameters": _PERSON}}


def _completed(path: str, body_of: Callable[[int], dict[str, Any]]) -> Visit:
    """Return a visit that expects a complete response."""

    async def visit(address: Address, number: int) -> str | None:
        outcome = await ask(address, path, body_of(number))
        return None if outcome.is_complete else f"not complete: {outcome}"

    return visit


def _rejected(path: str, body: dict[str, Any], status: int) -> Visit:
    async def visit(address: Address, number: int) -> str | None:
        outcome = await ask(address, path, body)
        is_right = outcome.status == status and outcome.error is not None
        return None if is_right else f"{status} and an error expected: {outcome}"

    return visit


def _got(path: str) -> Visit:
    async def visit(address: Address, number: int) -> str | None:
        outcome = await get(address, path)
        return None if outcome.status == 200 else f"{path}: {outcome}"

    return visit


async def _leave(address: Address, number: int) -> str | None:
    with suppress(ConnectionResetError, BrokenPipeError):
        await LEAVINGS[number % len(LEAVINGS)](address, random.Random(number))
    return None


def _streamed(question: str, **fields: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: chat(f"{number}: {question}", stream=True, **fields)


# One round; its order is the order of arrival.
ROUND: Final[tuple[Visit, ...]] = (
    _completed(CHAT, _streamed("what is next?")),
    _completed(CHAT, lambda n: chat(f"{n}. {_LONG} How was the weather?", max_tokens=8)),
    _leave,
    _completed(CHAT, _streamed("why?", system=_SYSTEM)),
    _completed(CHAT, _streamed("tell me a story.", max_tokens=48, priority="low")),
    _rejected(CHAT, {"messages": [], "max_tokens": 1}, 400),
    _completed(CHAT, lambda n: chat(f"{n}?", n=3, temperature=0.9, seed=n)),
    _completed(CHAT, _streamed("who?", system=_SYSTEM, priority="high")),
    _completed(CHAT, lambda n: chat(f"Who is number {n}?", response_format=_person_schema(n))),
    _leave,
    _completed(CHAT, _streamed("what is it?", logprobs=True, top_logprobs=5)),
    _completed(CHAT, lambda n: chat(f"Look {n} up.", tools=[_tool(n)], tool_choice="required")),
    _got("/metrics"),
    _rejected(CHAT, chat("Hi", model="no-such-model"), 404),
    _completed(COMPLETIONS, lambda n: {"prompt": [f"{n} is", f"{n} was"], "max_tokens": 8}),
    _completed(CHAT, _streamed("say it again.", stop=["."], max_tokens=32)),
    _leave,
    _rejected(COMPLETIONS, {"prompt": "Hi", "max_tokens": 10**6}, 400),
    _completed(COMPLETIONS, lambda n: {"prompt": f"{n}", "echo": True, "logprobs": 2}),
    _got("/ready"),
)


async def wander(
    address: Address, tally: Tally, numbers: Iterator[int], is_over: Callable[[], bool]
) -> None:
    """Make one visit after another, in the order of the rounds."""
    for number in numbers:
        if is_over():
            return
        fault = await ROUND[number % len(ROUND)](address, number)
        tally.num_requests += 1
        if fault is not None:
            tally.faults.append(f"request {number}: {fault}")


async def crowd(address: Address, num_clients: int, is_over: Callable[[], bool]) -> Tally:
    """Let clients share the visits until it is over, and let the last ones end."""
    tally, numbers = Tally(), count()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(wander(address, tally, numbers, is_over))
    return tally


def reference(number: int) -> dict[str, Any]:
    """Return a request whose completion is the same whenever it is sent."""
    return chat(f"Tell me about the number {number}.", max_tokens=24)


async def reference_texts(address: Address, num_requests: int = 4) -> list[str]:
    """Send the requests whose completions are always the same, all at once."""
    outcomes: list[Outcome] = await asyncio.gather(
        *(ask(address, CHAT, reference(number)) for number in range(num_requests))
    )
    return [outcome.text if outcome.is_complete else str(outcome) for outcome in outcomes]
