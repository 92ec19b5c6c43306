"""Conversations that are compacted: a summary by the model stands for them."""

from typing import Any, Final

import pytest
from openai.types.responses import ResponseCompactionItem

from app.prompts.compaction import REQUEST, summary_message
from app.storage.seal import Sealer
from tests.support.responses import PATH, Thinking, call, function, respond, response, stream
from tests.support.sdk_types import check_shape
from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

TRIGGER: Final = {"type": "compaction_trigger"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def num_tokens(server: Served, items: list[Any], **fields: Any) -> int:
    answer = await server.post(f"{PATH}/input_tokens", {"input": items} | fields)
    count: int = answer.json()["input_tokens"]
    return count


async def test_a_trigger_brings_one_sealed_item() -> None:
    async with served(b"They greet.") as server:
        answer = await response(server, [user("Hi"), TRIGGER], tools=[function()])
        assert answer["usage"]["input_tokens"] == await num_tokens(
            server, [user("Hi"), user(REQUEST)], tools=[function()]
        )
        sealer: Sealer = server.service.sealer
    (item,) = answer["output"]
    check_shape(item, ResponseCompactionItem)
    assert sealer.unseal("summary", item["encrypted_content"]) == "They greet."


async def test_a_summary_stands_for_what_was_before() -> None:
    async with served(b"They greet.") as server:
        (item,) = (await response(server, [user("Hi"), TRIGGER]))["output"]
        found = await num_tokens(server, [item, user("And?")])
        expected = await num_tokens(server, [user(summary_message("They greet.")), user("And?")])
        alias = await num_tokens(server, [item | {"type": "compaction_summary"}, user("And?")])
    assert found == expected == alias


async def test_a_chain_goes_on_from_the_summary() -> None:
    """Of what was before it only what the model is told stays."""
    told = {"role": "developer", "content": "Be kind."}
    async with served(b"They greet.") as server:
        first = await response(server, [told, user("Hi" * 99)])
        second = await response(server, [TRIGGER], previous_response_id=first["id"])
        third = await response(server, [user("And?")], previous_response_id=second["id"])
        expected = [told, user(summary_message("They greet.")), user("And?")]
        assert third["usage"]["input_tokens"] == await num_tokens(server, expected)


async def test_it_is_streamed_whole() -> None:
    async with served(b"They greet.") as server:
        events = await stream(server, [user("Hi"), TRIGGER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "output_item.done", "completed")
    ]
    assert events[2]["item"]["encrypted_content"] == ""
    assert events[3]["item"] == events[4]["response"]["output"][0]


async def test_reasoning_and_calls_are_no_summary() -> None:
    said = "<think>hm</think>" + call("add", a=1)
    async with served(said.encode(), tokenizer=Thinking()) as server:
        answer = await response(server, [user("Hi"), TRIGGER], tools=[function()])
        sealer: Sealer = server.service.sealer
    (item,) = answer["output"]
    assert sealer.unseal("summary", item["encrypted_content"]) == call("add", a=1)
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("said", [b"", b" \n"])
async def test_without_a_summary_it_fails(said: bytes) -> None:
    async with served(said) as server:
        answer = await response(server, [user("Hi"), TRIGGER])
        refused = await server.post(f"{PATH}/compact", {"input": "Hi"})
    assert (answer["status"], answer["output"]) == ("failed", [])
    assert refused.status_code == 500


async def test_the_endpoint_returns_what_the_user_said_and_a_summary() -> None:
    given = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("And?")]
    async with served(b"They greet.") as server:
        answer = await server.post(f"{PATH}/compact", {"input": given, "instructions": "Be kind."})
        compacted = answer.json()
        found = await num_tokens(server, compacted["output"])
        expected = [user("Hi"), user("And?"), user(summary_message("They greet."))]
        assert found == await num_tokens(server, expected)
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert compacted["usage"]["output_tokens"] == len("They greet.") + 1


async def test_bad_items_are_named() -> None:
    async with served() as server:
        early = await respond(server, [TRIGGER, user("Hi")])
        forged = await respond(server, [{"type": "compaction", "encrypted_content": "abc"}])
        empty = await respond(server, [{"type": "compaction"}])
    assert [each.status_code for each in (early, forged, empty)] == [400] * 3
    assert early.json()["error"]["param"] == "input.0"
    assert forged.json()["error"]["param"] == "input.0.encrypted_content"
    assert forged.json()["error"]["code"] == "invalid_encrypted_content"
    assert empty.json()["error"]["param"] == "input.0.encrypted_content"
