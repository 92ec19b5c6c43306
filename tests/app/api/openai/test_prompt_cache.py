"""`prompt_cache_key` and its like: what becomes of a prompt's blocks, and what usage says."""

from typing import Any, Final

import pytest
from pydantic import SecretStr

from app.api.openai.schemas.prompt_cache import PromptCacheFields
from batching import RetainedPrefix, Retention
from tests.support.rows import rows
from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

PROMPT: Final = "A long text about trees. " * 8
SESSION: Final[dict[str, Any]] = {"prompt_cache_key": "session"}


def kept(seconds: float, group: str = "", *, may_store: bool = True) -> Retention:
    return Retention(group, (RetainedPrefix(None, seconds),), may_store)


@rows(
    ("fields", "expected"),
    [
        ({}, Retention()),
        (SESSION, kept(600, "session")),
        ({"prompt_cache_options": {}}, kept(1800)),
        ({"prompt_cache_options": {"ttl": "12h"}}, kept(12 * 3600)),
        ({"prompt_cache_options": {"ttl": "5m"}} | SESSION, kept(600, "session")),
        (
            {"prompt_cache_options": {"ttl": "1h", "prewarm": False}} | SESSION,
            kept(3600, "session"),
        ),
        ({"prompt_cache_options": {"mode": "explicit"}} | SESSION, Retention("session")),
        ({"prompt_cache_retention": "24h"}, kept(24 * 3600)),
        ({"prompt_cache_retention": "in_memory"}, Retention(may_store=False)),
        ({"prompt_cache_retention": "in-memory"} | SESSION, kept(600, "session", may_store=False)),
        ({"prompt_cache_retention": None, "prompt_cache_options": None}, Retention()),
    ],
)
def test_what_is_retained(fields: dict[str, Any], expected: Retention) -> None:
    assert PromptCacheFields.model_validate(fields).retention() == expected


async def posted(server: Served, api: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": prompt}]},
        "completions": {"prompt": prompt},
        "responses": {"input": prompt},
    }
    response = await server.post(f"/v1/{api}", bodies[api] | fields)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


APIS: Final = ("chat/completions", "completions", "responses")


@pytest.mark.parametrize("api", APIS)
async def test_usage_says_what_was_written(api: str) -> None:
    names = (
        ("input", "input_tokens_details")
        if api == "responses"
        else ("prompt", "prompt_tokens_details")
    )
    async with served() as server:
        first = await posted(server, api, **SESSION)
        again = await posted(server, api, **SESSION)
        other = await posted(server, api)
    total = first[f"{names[0]}_tokens"]
    assert first[names[1]]["cache_write_tokens"] == total - 1
    cached = again[names[1]]["cached_tokens"]
    assert cached > total - 33
    assert again[names[1]]["cache_write_tokens"] == total - 1 - cached
    assert not other[names[1]].get("cache_write_tokens")


@pytest.mark.parametrize("api", APIS)
async def test_a_session_outlives_others(api: str) -> None:
    """Of 32 blocks a session may have 8, and others need all."""
    for fields, is_there in (({}, False), (SESSION, True)):
        async with served(num_blocks=32) as server:
            await posted(server, api, **fields)
            for i in range(8):
                await posted(server, api, f"{i}{PROMPT}")
            usage = await posted(server, api, **fields)
        details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
        assert (details["cached_tokens"] > 0) == is_there


async def test_beams_are_a_session_as_well() -> None:
    async with served() as server:
        usage = await posted(
            server, "completions", use_beam_search=True, best_of=2, max_tokens=2, **SESSION
        )
        stats = await server.engine.stats()
    assert usage["prompt_tokens_details"]["cache_write_tokens"] == usage["prompt_tokens"] - 1
    assert stats.num_retained_blocks


async def test_keys_of_clients_are_sessions_of_their_own() -> None:
    """What one client calls a session takes nothing from another's."""
    prompts = ("one" * 90, "two" * 90)
    async with served(api_keys=SecretStr("a,b"), num_blocks=64) as server:
        for key, prompt in zip("ab", prompts, strict=True):
            server.client.headers["Authorization"] = f"Bearer {key}"
            await posted(server, "completions", prompt, **SESSION)
        stats = await server.engine.stats()
    # 8 blocks each, of the 16 that one may have.
    assert stats.num_retained_blocks == 16


async def test_a_prompt_that_must_not_be_cached_is_not_retained() -> None:
    async with served() as server:
        usage = await posted(server, "completions", cache_prompt=False, **SESSION)
        stats = await server.engine.stats()
    assert "cache_write_tokens" not in usage["prompt_tokens_details"]
    assert stats.num_retained_blocks == 0


@rows(
    ("fields", "param"),
    [
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "2d"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
    ],
)
@pytest.mark.parametrize("api", APIS)
async def test_what_cannot_be_asked_for_is_refused(
    api: str, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    named = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[api]
    async with served() as server:
        response = await server.post(f"/v1/{api}", {named: body[named]} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_only_a_response_may_have_no_output() -> None:
    options = {"prompt_cache_options": {"prewarm": True}}
    async with served() as server:
        refused = [await server.chat(**options), await server.complete(**options)]
        warm = await server.post("/v1/responses", {"input": "Hi"} | options)
    assert [each.json()["error"]["param"] for each in refused] == 2 * [
        "prompt_cache_options.prewarm"
    ]
    assert (warm.json()["status"], warm.json()["output"]) == ("completed", [])
