"""Requests to `/v1/responses`, and what comes back held against the types of OpenAI's client."""

import json
from collections.abc import Sequence
from typing import Any, Final

import httpx
import pytest
from openai.types.responses import (
    Response,
    ResponseItemList,
    ResponseStreamEvent,
)

from app.api.openai.responses.items.open_items import Event
from app.api.openai.responses.response_writer import EncodedEvent, ResponseWriter
from tests.support.byte_tokenizers import Bytes
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, Served

PATH: Final = "/v1/responses"
# A format of a text that the model cannot end early.
ENDLESS: Final = {
    "type": "json_schema",
    "name": "numbers",
    "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 3000},
}


async def respond(server: Served, input_: Any = "Hi", **fields: Any) -> httpx.Response:
    return await server.post(PATH, {"model": MODEL_ID, "input": input_} | fields)


async def response(server: Served, input_: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """Return a whole response, which has OpenAI's shape."""
    answer = await respond(server, input_, **fields)
    assert answer.status_code == 200, answer.text
    return checked_response(answer.json())


async def stream(server: Served, input_: Any = "Hi", **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, numbered and of OpenAI's shape."""
    answer = await respond(server, input_, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def events_in(text: str) -> list[dict[str, Any]]:
    events = []
    for number, frame in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        check_shape(event, ResponseStreamEvent)
        events.append(event)
    return events


def checked_response(answer: dict[str, Any]) -> dict[str, Any]:
    check_shape(answer, Response)
    return answer


def checked_items(answer: dict[str, Any]) -> list[dict[str, Any]]:
    check_shape(answer, ResponseItemList)
    items: list[dict[str, Any]] = answer["data"]
    return items


def without_ids(value: Any) -> Any:
    """Return a value without what differs from response to response."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    random = {"id", "item_id", "call_id", "created_at", "completed_at", "sequence_number"}
    return {name: without_ids(each) for name, each in value.items() if name not in random}


class Thinking(Bytes):
    """Thinks before it answers."""

    has_thinking = True
    think_start = "<think>"
    think_end = "</think>"


def function(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name} | fields


def custom(name: str = "patch", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name} | fields


def call(name: str, **arguments: Any) -> str:
    """Return a call as a model writes it that has no format of its own."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def unwritable(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Make the event of a kind one that cannot be written."""
    encode = ResponseWriter.encode

    def encode_others(writer: ResponseWriter, events: Sequence[Event]) -> list[EncodedEvent]:
        if any(kind == f"response.{name}" for name, _ in events):
            raise ValueError
        return encode(writer, events)

    monkeypatch.setattr(ResponseWriter, "encode", encode_others)
