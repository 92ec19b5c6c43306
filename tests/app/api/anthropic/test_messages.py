"""`/v1/messages`: what is sent, streamed and not, over a model that says a given text."""

import asyncio
import json
from typing import Any, Final

import pytest
from starlette.types import Message

from app.api import sse
from app.api.anthropic.response_builder import BlockEvents, MessageBuilder
from app.generation.generation import ChoiceResult, GenerationSummary
from app.observability.request_record import TokenUsage
from app.parsing.events import ContentPiece, MessageEvent, ToolCallArguments, ToolCallStart
from app.storage.seal import Sealer
from batching import FinishReason
from tests.support.byte_tokenizers import Bytes, Thinking
from tests.support.rows import rows
from tests.support.speaker import (
    MODEL_ID,
    Breaking,
    served,
    served_endlessly,
)

pytestmark = pytest.mark.anyio

PATH: Final = "/v1/messages"
ADD: Final = {"name": "add", "input_schema": {"properties": {"x": {"type": "integer"}}}}
CALL: Final = b'<tool_call>\n{"name": "add", "arguments": {"x": 12}}\n</tool_call>'
PROMPT: Final = "user: Hi\nassistant:"


def usage(num_output: int, *, num_input: int = len(PROMPT), num_thinking: int = 0) -> Any:
    return {
        "input_tokens": num_input,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": 0,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thinking},
        "inference_geo": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }


def at_the_end(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the last event of a stream has."""
    others = ("cache_creation", "inference_geo", "service_tier")
    return {name: value for name, value in usage.items() if name not in others}


def at_the_start(usage: dict[str, Any]) -> dict[str, Any]:
    return usage | {"cache_creation": None}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def events(body: str) -> list[dict[str, Any]]:
    """Return what the events carry; each is named by its type."""
    assert body.endswith("\n\n")
    found = []
    for frame in body.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def within(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events between the start of a message, with its ping, and its end."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return events[2:-2]


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content that a client makes of the events."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            delta = dict(event["delta"])
            kind = delta.pop("type").removesuffix("_delta")
            ((name, piece),) = delta.items()
            if kind == "input_json":
                texts.append(piece)
            else:
                assert kind == name
                blocks[-1][name] += piece
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads("".join(texts))
                texts.clear()
    assert not is_open
    return blocks


async def test_a_message_is_anthropics() -> None:
    async with served("né!".encode()) as server:
        response = await server.message()
    message = response.json()
    assert response.status_code == 200
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL_ID,
        "content": [text_block("né!")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": usage(5),
    }


async def test_a_stream_is_anthropics() -> None:
    async with served("né!".encode()) as server:
        response = await server.message(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    start, *others = events(response.text)
    assert start["message"].pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": MODEL_ID,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "diagnostics": None,
            "usage": at_the_start(usage(0)),
        },
    }
    pieces = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": letter}}
        for letter in "né!"
    ]
    text = text_block("")
    assert others == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": text},
        *pieces,
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "stop_details": None,
                "container": None,
            },
            "usage": at_the_end(usage(5)),
        },
        {"type": "message_stop"},
    ]


async def test_max_tokens_is_reduced_to_what_the_context_has_room_for() -> None:
    async with served(None, num_blocks=1) as server:
        responses = [await server.message(max_tokens=number) for number in (128_000, None)]
    for response in responses:
        message = response.json()
        assert message["stop_reason"] == "max_tokens"
        assert message["usage"] == usage(32 - len(PROMPT))


async def test_a_stop_sequence_is_named() -> None:
    async with served(b"one, two") as server:
        fields: dict[str, Any] = {"stop_sequences": [", t", "three"]}
        message = (await server.message(**fields)).json()
        *_, last, _ = events((await server.message(stream=True, **fields)).text)
    assert message["content"] == [text_block("one")]
    reason = {"stop_reason": "stop_sequence", "stop_sequence": ", t"}
    assert {name: message[name] for name in reason} == reason
    assert last["delta"] == reason | {"stop_details": None, "container": None}


async def test_a_prompt_that_was_read_before_is_counted_as_cached() -> None:
    content = "x" * 100
    num_tokens = len(content) + len("user: \nassistant:")
    async with served() as server:
        await server.message(content)
        message = (await server.message(content)).json()
        start, *_, last, _ = events((await server.message(content, stream=True)).text)
    expected = usage(7, num_input=num_tokens - 96) | {"cache_read_input_tokens": 96}
    assert message["usage"] == expected
    assert last["usage"] == at_the_end(expected)
    assert start["message"]["usage"] == at_the_start(usage(0, num_input=num_tokens))


async def test_the_last_turn_is_continued() -> None:
    begun = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "The answer"},
    ]
    async with served(b" is 3.") as server:
        message = (await server.message(messages=begun)).json()
    assert message["content"][0]["text"] == " is 3."
    assert message["usage"]["input_tokens"] == len("user: Hi\nassistant: The answer")


# Tools


async def test_a_call_is_a_block() -> None:
    async with served(b"Well. " + CALL) as server:
        message = (await server.message(tools=[ADD])).json()
        streamed = events((await server.message(tools=[ADD], stream=True)).text)
        ignored = (await server.message(tools=[ADD], tool_choice={"type": "none"})).json()
    text, call = message["content"]
    assert text == text_block("Well.")
    assert call.pop("id").startswith("toolu_")
    assert call == {
        "type": "tool_use",
        "name": "add",
        "input": {"x": 12},
        "caller": {"type": "direct"},
    }
    assert message["stop_reason"] == streamed[-2]["delta"]["stop_reason"] == "tool_use"
    streamed_text, streamed_call = joined(within(streamed))
    assert streamed_text == text
    assert streamed_call.pop("id").startswith("toolu_")
    assert streamed_call == call
    assert ignored["content"][0]["text"].endswith("</tool_call>")
    assert ignored["stop_reason"] == "end_turn"


async def test_calls_and_texts_between_them_are_blocks_of_their_own() -> None:
    async with served(CALL + b" And " + CALL) as server:
        message = (await server.message(tools=[ADD])).json()
        streamed = events((await server.message(tools=[ADD], stream=True)).text)
    kinds = ["tool_use", "text", "tool_use"]
    assert [block["type"] for block in message["content"]] == kinds
    assert [block["type"] for block in joined(within(streamed))] == kinds
    assert len({block["id"] for block in message["content"] if "id" in block}) == 2


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b'{"x": [1, {"y": "cut o', {"x": [1, {}]}),
        (b'{"x": 12}}\n</tool_call>', {"x": 12}),
        (b'{"x": "\\ud800"}}\n</tool_call>', {"x": "\ufffd"}),
        (b'{"x": NaN}}\n</tool_call>', {"INVALID_JSON": '{"x": NaN}'}),
        (b'{"x": 1e999, "y": "cut o', {"x": None}),
        (b"[1]}\n</tool_call>", {"INVALID_JSON": "[1]"}),
        (b"", {}),
    ],
)
async def test_the_input_is_an_object_also_where_the_text_is_none(
    said: bytes, expected: dict[str, Any]
) -> None:
    async with served(b'<tool_call>\n{"name": "add", "arguments": ' + said) as server:
        response = await server.message(tools=[ADD])
    assert response.status_code == 200
    calls = [block for block in response.json()["content"] if block["type"] == "tool_use"]
    assert all(call["input"] == expected for call in calls)


@rows(
    "arguments",
    [
        '{"x": ' + "[" * 300 + "]" * 300 + "}",
        '{"x": ' + "1" * 5000 + "}",
        '{"x": 1e999, "y": 0.10, "y": -0}',
        '{"x": "\\"input\\":{}", "input":{}}',
        "{}",
    ],
)
def test_the_input_is_what_a_stream_has(arguments: str) -> None:
    said: list[MessageEvent] = [
        ContentPiece('Say "input":{}.'),
        ToolCallStart(0, "call_0", "add"),
        ToolCallArguments(0, arguments),
        ToolCallStart(1, "call_1", "add"),
    ]
    builder = MessageBuilder(
        message_id="msg_1",
        model_id='"input":{}',
        request_id="req-1",
        sealer=Sealer(b"a key"),
        omits_thinking=False,
    )
    result = ChoiceResult(0, said, (), (), (), FinishReason.TOOL_CALLS)
    whole = builder.full_json([result], GenerationSummary(TokenUsage(num_prompt_tokens=1), ()))
    blocks = BlockEvents(builder)
    streamed = b"".join(frame for event in said for frame in blocks.add(event)).decode()
    assert f'"name":"add","input":{arguments},"caller":{{' in whole
    assert f'"partial_json":{json.dumps(arguments)}' in streamed
    assert '"name":"add","input":{},"caller":{"type":"direct"}}],"stop_reason"' in whole
    assert json.loads(whole, parse_int=str)["content"][0]["text"] == 'Say "input":{}.'


async def test_a_call_that_is_forced_ends_the_message() -> None:
    async with served(CALL + b"\nAnd", tokenizer=Bytes()) as server:
        choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        message = (await server.message(tools=[ADD], tool_choice=choice)).json()
    (call,) = message["content"]
    assert (call["name"], call["input"]) == ("add", {"x": 12})
    assert message["stop_reason"] == "tool_use"


async def test_a_text_follows_its_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    async with served(b'{"x": 1} and more', tokenizer=Bytes()) as server:
        config = {"format": {"type": "json_schema", "schema": schema}}
        message = (await server.message(output_config=config)).json()
        bad = {"format": {"type": "json_schema", "schema": {"type": "strange"}}}
        rejected = await server.message(output_config=bad)
    assert message["content"] == [text_block('{"x": 1}')]
    assert rejected.status_code == 400
    assert rejected.json()["error"]["message"].startswith("output_config.format: ")


# Thinking


async def test_thinking_is_a_block_with_a_signature_and_comes_back() -> None:
    async with served(b"<think>Hm.</think>Yes.", tokenizer=Thinking()) as server:
        message = (await server.message()).json()
        streamed = joined(within(events((await server.message(stream=True)).text)))
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": "Sure?"},
        ]
        again = await server.message(messages=turns)
        turns[1]["content"][0]["signature"] += "="
        forged = await server.message(messages=turns)
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert text == text_block("Yes.")
    assert streamed == [thinking | {"signature": streamed[0]["signature"]}, text]
    assert streamed[0]["signature"] + "=" == thinking["signature"]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert again.status_code == 200
    assert forged.status_code == 400
    assert "Invalid `signature` in `thinking` block" in forged.json()["error"]["message"]


async def test_thinking_that_is_omitted_is_in_the_signature() -> None:
    asked = {"thinking": {"type": "adaptive", "display": "omitted"}}
    async with served(b"Hm.</think>Yes.", tokenizer=Thinking()) as server:
        message = (await server.message(**asked)).json()
        streamed = events((await server.message(stream=True, **asked)).text)
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": "Sure?"},
        ]
        again = await server.message(messages=turns)
        sealed = server.service.sealer.unseal("thinking", message["content"][0]["signature"])
    assert message["content"][0]["thinking"] == ""
    assert sealed == "Hm."
    assert joined(within(streamed)) == message["content"]
    assert not any(e.get("delta", {}).get("type") == "thinking_delta" for e in streamed)
    assert again.status_code == 200


async def test_thinking_that_is_cut_off_has_a_signature_too() -> None:
    async with served(b"<think>Hm, let me see", tokenizer=Thinking()) as server:
        streamed = events((await server.message(stream=True)).text)
    (thinking,) = joined(within(streamed))
    assert thinking["thinking"] == "Hm, let me see"
    assert thinking["signature"]


# Errors


async def test_a_failure_in_the_middle_is_an_event() -> None:
    async with served(b"ok", runner=Breaking) as server:
        response = await server.message(stream=True)
    *_, error = events(response.text)
    assert error == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "the model failed while serving this request",
        },
        "request_id": response.headers["x-request-id"],
    }


async def test_a_silent_stream_is_kept_alive_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says its second token when a ping has come, so without one this would not end."""
    monkeypatch.setattr(sse, "PING_INTERVAL", 0.01)
    body = json.dumps(
        {"max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    ).encode()
    parts: list[bytes] = []
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async with served_endlessly() as server:

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError("the client sends no second message")

        async def send(message: Message) -> None:
            parts.append(message.get("body", b""))
            if b"content_block_delta" in b"".join(parts[:-1]) and parts[-1].startswith(
                b"event: ping"
            ):
                server.gate.open()

        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": headers,
        }
        await server.app(scope, receive, send)
    assert parts.count(b'event: ping\ndata: {"type": "ping"}\n\n') >= 1
    assert b"".join(parts).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_without_tokens_the_prompt_is_read_into_the_cache() -> None:
    body = {"messages": [{"role": "user", "content": "Hi" * 40}], "max_tokens": 0}
    async with served(b"Hello!") as server:
        whole = (await server.post(PATH, body)).json()
        told = events((await server.post(PATH, body | {"stream": True})).text)
        after = (await server.post(PATH, body | {"max_tokens": 6})).json()
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    assert whole["usage"]["output_tokens"] == 0
    assert within(told) == []
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"
    assert whole["usage"]["cache_read_input_tokens"] == 0
    assert after["usage"]["cache_read_input_tokens"] > 0
    assert after["content"] == [text_block("Hello!")]


# Other paths


async def test_tokens_are_counted() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with served() as server:
        plain = await server.post(f"{PATH}/count_tokens", body)
        more = await server.post(f"{PATH}/count_tokens?beta=true", body | {"tools": [ADD]})
        begun = {"role": "assistant", "content": "So"}
        continued = await server.post(
            f"{PATH}/count_tokens", {"messages": [*body["messages"], begun]}
        )
    assert plain.json() == {"input_tokens": len(PROMPT)}
    assert more.json()["input_tokens"] > len(PROMPT) + 100
    assert continued.json() == {"input_tokens": len("user: Hi\nassistant: So")}


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_it_can_be_seen_that_the_server_is_there(path: str) -> None:
    async with served() as server:
        response = await server.client.head(path)
        models = await server.client.get("/v1/models?limit=1000")
    assert (response.status_code, response.content) == (200, b"")
    assert models.json()["data"][0]["id"] == MODEL_ID


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (r'{"a": "\ud800 x"}', {"a": "\ufffd x"}),
        (r'{"a": "\ud83d\ude0a"}', {"a": "😊"}),
        (r'{"a": "\\ud800"}', {"a": r"\ud800"}),
        (r'"{\"a\": \"\ud800\"}"', {"a": "\ufffd"}),
    ],
)
async def test_half_a_surrogate_pair_in_a_call_is_replaced(
    arguments: str, expected: dict[str, str]
) -> None:
    answer = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    tool = {"name": "add", "input_schema": {"type": "object"}}
    async with served(answer.encode()) as server:
        response = await server.message(tools=[tool])
    assert response.json()["content"][0]["input"] == expected


async def test_half_a_surrogate_pair_is_no_name() -> None:
    answer = rb'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
    tool = {"name": "add", "input_schema": {"type": "object"}}
    async with served(answer) as server:
        response = await server.message(tools=[tool])
    assert response.json()["content"][0]["name"] == "\ufffd"
