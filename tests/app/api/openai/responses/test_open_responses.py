"""The cases by which Open Responses, of 2026-04-24, tells whether a server follows it, and rules of its streams.

The judge of each object and event is `check_shape`, which knows what that specification requires.
"""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.support.byte_tokenizers import Bytes
from tests.support.fake_images import Seeing, data_url, picture, seeing
from tests.support.responses import (
    Thinking,
    call,
    checked_items,
    custom,
    function,
    respond,
    response,
    stream,
)
from tests.support.speaker import served

pytestmark = pytest.mark.anyio

Event = dict[str, Any]

WEATHER: Final = function(
    "get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}
)
CALL: Final = call("get_weather", city="Rome").encode()
# What the parts of an item are called in its events, in the order of their beginnings.
DELTAS: Final = {
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
    "reasoning": "response.reasoning_text.delta",
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def of_item(events: Sequence[Event], index: int) -> list[Event]:
    return [event for event in events if event.get("output_index") == index]


def written(item: dict[str, Any]) -> str:
    """Return the text of an item, whatever it is."""
    if item["type"] in ("message", "reasoning"):
        return "".join(part["text"] for part in item["content"])
    text: str = item["input"] if item["type"] == "custom_tool_call" else item["arguments"]
    return text


def check_stream(events: Sequence[Event], status: str = "completed") -> list[dict[str, Any]]:
    """Hold a stream to the rules of its order; return the items of its response."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    assert kinds[-1] == f"response.{status}"
    last = events[-1]["response"]
    assert last["status"] == status
    places = [event["output_index"] for event in events[2:-1]]
    assert places == sorted(places)
    items: list[dict[str, Any]] = last["output"]
    assert set(places) == set(range(len(items)))
    for index, item in enumerate(items):
        first, *others, done = of_item(events, index)
        assert (first["type"], done["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        assert (first["item"]["id"], done["item"]) == (item["id"], item)
        assert {event["item_id"] for event in others} == {item["id"]}
        pieces = [event["delta"] for event in others if event["type"] == DELTAS[item["type"]]]
        assert "".join(pieces) == written(item)
        begun = [event["type"] for event in others].count("response.content_part.added")
        ended = [event["type"] for event in others].count("response.content_part.done")
        assert begun == ended == (item["type"] in ("message", "reasoning"))
    return items


async def test_basic_text() -> None:
    async with served(b"Hello there, you.") as server:
        answer = await response(server, [said("user", "Say hello in three words.")])
    assert answer["status"] == "completed"
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert written(item) == "Hello there, you."
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_a_streamed_text() -> None:
    async with served(b"1, 2, 3") as server:
        events = await stream(server, [said("user", "Count.")])
    (item,) = check_stream(events)
    assert written(item) == "1, 2, 3"
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_system_prompt(role: str) -> None:
    prompt = [said(role, "You are a pirate."), said("user", "Say hello.")]
    async with served(b"Ahoy!") as server:
        answer = await response(server, prompt)
        without = await response(server, prompt[1:])
    assert answer["status"] == "completed"
    assert answer["usage"]["input_tokens"] > without["usage"]["input_tokens"]


async def test_a_call_of_a_tool_and_its_output() -> None:
    prompt = [said("user", "How is the weather in Rome?")]
    async with served(CALL, tokenizer=Bytes()) as server:
        answer = await response(server, prompt, tools=[WEATHER])
        (item,) = answer["output"]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "21"}
        after = await response(server, [*prompt, item, output], tools=[WEATHER])
    assert (item["type"], item["name"], item["status"]) == (
        "function_call",
        "get_weather",
        "completed",
    )
    assert item["arguments"] == '{"city": "Rome"}'
    assert after["usage"]["input_tokens"] > answer["usage"]["input_tokens"]


@pytest.mark.parametrize("tools", [[WEATHER], [custom("get_weather")]], ids=["function", "custom"])
async def test_a_streamed_call(tools: list[dict[str, Any]]) -> None:
    spoken = b"Well. " + (
        CALL if tools == [WEATHER] else call("get_weather", input="Rome").encode()
    )
    async with served(spoken, tokenizer=Bytes()) as server:
        events = await stream(server, "How is it?", tools=tools)
    text, called = check_stream(events)
    assert text["type"] == "message"
    assert "Rome" in written(called)


async def test_streamed_reasoning() -> None:
    async with served(b"<think>Hm.</think>\n\n4", tokenizer=Thinking()) as server:
        thought, text = check_stream(await stream(server, "2 + 2?"))
    assert (written(thought), written(text)) == ("Hm.", "4")


async def test_a_response_without_room_is_incomplete() -> None:
    async with served(b"Hello!") as server:
        events = await stream(server, max_output_tokens=2)
    (item,) = check_stream(events, "incomplete")
    assert item["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_image() -> None:
    image = {"type": "input_image", "image_url": data_url(picture(3))}
    question = {"type": "input_text", "text": "What is this?"}
    async with seeing() as server:
        prompt = [{"type": "message", "role": "user", "content": [question, image]}]
        answer = await response(server, prompt)
        items = await server.client.get(f"/v1/responses/{answer['id']}/input_items")
    assert answer["status"] == "completed"
    assert "(3)" in Seeing.prompts[0]
    (item,) = checked_items(items.json())
    assert item["content"] == [question, image | {"detail": "auto"}]


async def test_a_conversation_of_several_turns() -> None:
    history = [said("user", "I am Alice."), said("assistant", "Hello!"), said("user", "Who am I?")]
    async with served(b"Alice.") as server:
        answer = await response(server, history)
        first = await response(server, history[:1])
        chained = await response(server, "Who am I?", previous_response_id=first["id"])
    assert answer["status"] == chained["status"] == "completed"
    assert chained["previous_response_id"] == first["id"]


async def test_what_a_request_asks_is_in_its_response() -> None:
    asked = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_logprobs": 2,
        "max_output_tokens": 20,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "store": False,
        "service_tier": "flex",
        "metadata": {"k": "v"},
        "instructions": "Be brief.",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    async with served(b"Hello!") as server:
        answer = await response(server, **asked)
        retained = await response(server, prompt_cache_retention="in-memory")
    assert {name: answer[name] for name in asked} == asked
    assert retained["prompt_cache_retention"] == "in_memory"


async def test_an_error_has_all_its_members() -> None:
    async with served() as server:
        answer = await respond(server, 1)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == {"type", "code", "message", "param"}
    assert (error["type"], error["param"]) == ("invalid_request_error", "input")
