"""An agent's turns find in the cache what they share with the turn before."""

from itertools import pairwise
from typing import Any, Final

import pytest

from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

BLOCK_SIZE: Final = 32
INSTRUCTIONS: Final = "Work step by step. " * 40
SEARCH: Final[dict[str, Any]] = {
    "name": "search",
    "description": "Finds tools.",
    "input_schema": {},
}
LATER: Final[dict[str, Any]] = {
    "name": "edit",
    "description": "Edits.",
    "input_schema": {},
    "defer_loading": True,
}
REMINDER: Final = {"role": "system", "content": "The file has changed."}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def billing(agent: int) -> dict[str, Any]:
    return text(f"x-anthropic-billing-header: cc_version=2.1; cch={agent:05x};")


def found_tool(number: int) -> list[dict[str, Any]]:
    """Return a call that finds the deferred tool, and its result."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "search", "input": {"q": "edit"}}
    reference = {"type": "tool_reference", "tool_name": "edit"}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": [reference]}
    return [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text("Go on.")]},
    ]


async def run_agent(server: Served, agent: int) -> list[tuple[int, int]]:
    """Return the tokens of each turn's prompt, and how many were cached."""
    tools = [SEARCH]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Agent {agent}, begin."}]
    numbers = []
    for turn in range(8):
        if turn == 3:
            messages += found_tool(turn)
            tools = [SEARCH, LATER]
        if turn == 5:
            messages.append(REMINDER)
        response = await server.message(
            messages=messages, tools=tools, system=[billing(agent), text(INSTRUCTIONS)]
        )
        message = response.json()
        usage = message["usage"]
        cached = usage["cache_read_input_tokens"]
        total = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        numbers.append((total, cached))
        messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": f"Continue with step {turn}."},
        ]
    return numbers


async def test_each_turn_finds_the_one_before_and_each_agent_the_system_prompt() -> None:
    async with served(b"Done, as far as I see.", num_blocks=1024) as server:
        agents = [await run_agent(server, agent) for agent in range(2)]
    for turns in agents:
        for (before, _), (total, cached) in pairwise(turns):
            assert total > before
            assert cached >= before - BLOCK_SIZE
    assert agents[0][0][1] == 0
    assert agents[1][0][1] >= len(INSTRUCTIONS) - BLOCK_SIZE
