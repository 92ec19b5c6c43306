"""Anthropic's own client, and its types: nothing unknown, nothing missing."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anthropic
import httpx2
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, SecretStr

from tests.support.byte_tokenizers import Bytes, Thinking
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, Breaking, Served, served

pytestmark = pytest.mark.anyio

ADD: Final[dict[str, Any]] = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL: Final = b'<tool_call>\n{"name": "add", "arguments": {"x": 12}}\n</tool_call>'
THOUGHT: Final = b"<think>Hm.</think>"
USER: Final = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def client_of(server: Served, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
    async with anthropic.AsyncAnthropic(
        base_url="http://localhost", api_key=key, http_client=http, max_retries=0
    ) as client:
        yield client


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: ")]


def content(message: Message | BetaMessage) -> list[dict[str, Any]]:
    return [block.model_dump() for block in message.content]


SAID: Final = {
    "text": b"Hello!",
    "call": b"Well. " + CALL + CALL,
    "thinking": THOUGHT + b"Yes. " + CALL,
    "nothing": b"",
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(
    ("query", "message", "event"),
    [
        ("", Message, RawMessageStreamEvent),
        ("?beta=true", BetaMessage, BetaRawMessageStreamEvent),
    ],
    ids=["", "beta"],
)
async def test_messages_and_events_have_the_types_of_the_sdk(
    query: str, message: Any, event: Any, said: str
) -> None:
    body = {"model": MODEL_ID, "max_tokens": 200, "messages": [USER], "tools": [ADD]}
    path = f"/v1/messages{query}"
    async with served(SAID[said], tokenizer=Thinking()) as server:
        whole = (await server.post(path, body)).json()
        streamed = events((await server.post(path, body | {"stream": True})).text)
    check_shape(whole, message)
    # The client's types leave out the event that keeps a stream alive.
    assert [e for e in streamed if e["type"] == "ping"] == [{"type": "ping"}]
    for each in streamed:
        if each["type"] != "ping":
            check_shape(each, event)


async def test_errors_and_counts_have_the_types_of_the_sdk() -> None:
    async with served(b"ok", runner=Breaking) as server:
        errors = [
            (await server.message(model="m")).json(),
            (await server.message(max_tokens=-1)).json(),
            (await server.message()).json(),
            events((await server.message(stream=True)).text)[-1],
        ]
        path, body = "/v1/messages/count_tokens", {"messages": [USER]}
        count = (await server.post(path, body)).json()
        beta_count = (await server.post(f"{path}?beta=true", body)).json()
    for error in errors:
        check_shape(error, ErrorResponse)
    check_shape(count, MessageTokensCount)
    check_shape(beta_count, BetaMessageTokensCount)


async def test_a_conversation_with_thinking_and_a_tool_comes_back_as_the_client_has_it() -> None:
    said = THOUGHT + b"Well. " + CALL
    messages: list[Any] = [USER]
    async with served(said, tokenizer=Thinking()) as server, client_of(server) as client:
        fields: dict[str, Any] = {"model": MODEL_ID, "max_tokens": 200, "tools": [ADD]}
        async with client.messages.stream(messages=messages, **fields) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(messages=messages, **fields)
        for message in (streamed, whole):
            thinking, text, call = content(message)
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
            assert (text["type"], text["text"]) == ("text", "Well.")
            assert (call["type"], call["input"]) == ("tool_use", {"x": 12})
            assert message.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "24"}
            messages += [message.to_param(), {"role": "user", "content": [result]}]
        last = await client.messages.create(messages=messages, **fields)
        assert (streamed.usage.input_tokens, streamed.usage.cache_read_input_tokens) == (
            whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0),
            0,
        )
    assert last.usage.cache_read_input_tokens


async def test_betas_are_served() -> None:
    async with served(b"Hello!") as server, client_of(server) as client:
        message = await client.beta.messages.create(
            model=MODEL_ID,
            max_tokens=16_000,
            messages=[{"role": "user", "content": "Hi"}],
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            thinking={"type": "adaptive", "display": "omitted"},
            output_config={"effort": "high"},
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            betas=["context-management-2025-06-27"],
        )
        count = await client.beta.messages.count_tokens(
            model=MODEL_ID, messages=[{"role": "user", "content": "Hi"}]
        )
    assert content(message)[0]["text"] == "Hello!"
    assert count.input_tokens == len("user: Hi\nassistant:")


class Sum(BaseModel):
    x: int


async def test_a_parsed_message_follows_its_type() -> None:
    async with served(b'{"x":24}', tokenizer=Bytes()) as server, client_of(server) as client:
        message = await client.messages.parse(
            model=MODEL_ID,
            max_tokens=32,
            messages=[{"role": "user", "content": "Hi"}],
            output_format=Sum,
        )
    assert message.parsed_output == Sum(x=24)


async def test_errors_are_those_of_the_client() -> None:
    async with (
        served(api_keys=SecretStr("sk-one"), max_body_bytes=8192) as server,
        client_of(server, "sk-one") as client,
        client_of(server) as stranger,
    ):

        async def error_of(by: anthropic.AsyncAnthropic, **fields: Any) -> Exception:
            body: Any = {"model": MODEL_ID, "max_tokens": 8, "messages": [USER], **fields}
            with pytest.raises(anthropic.APIStatusError) as caught:
                await by.messages.create(**body)
            return caught.value

        long = {"role": "user", "content": "x" * 4000}
        too_long = await error_of(client, messages=[long])
        assert isinstance(too_long, anthropic.BadRequestError)
        assert "prompt is too long: 4017 tokens > 2048 maximum" in too_long.message
        assert isinstance(await error_of(client, model="m"), anthropic.NotFoundError)
        assert isinstance(await error_of(stranger), anthropic.AuthenticationError)
        large = {"role": "user", "content": "x" * 9000}
        too_large = await error_of(client, messages=[large])
        assert isinstance(too_large, anthropic.APIStatusError)
        assert too_large.status_code == 413
        server.service.admission.is_draining = True
        busy = await error_of(client)
        assert isinstance(busy, anthropic.InternalServerError)
        assert busy.status_code == 503


async def test_models_are_those_of_the_client() -> None:
    async with served(model_ids=(MODEL_ID, "other")) as server, client_of(server) as client:
        listed = [model async for model in client.models.list(limit=1)]
        one = await client.models.retrieve("other")
        version = {"anthropic-version": "2023-06-01"}
        page = (await server.client.get("/v1/models", headers=version)).json()
        with pytest.raises(anthropic.NotFoundError, match="'gone' does not exist here") as caught:
            await client.models.retrieve("gone")
    for model in page["data"]:
        check_shape(model, ModelInfo)
    assert page.keys() == {"data", "has_more", "first_id", "last_id"}
    assert [model.id for model in listed] == [MODEL_ID, "other"]
    assert (one.type, one.display_name, one.lifecycle) == ("model", "other", "active")
    assert one.created_at == listed[1].created_at
    assert one.created_at.tzinfo is not None
    assert caught.value.request_id
