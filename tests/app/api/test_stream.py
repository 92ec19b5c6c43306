"""Streams: the bytes on the wire, and clients that leave."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import pytest
from fastapi import Request
from sse_starlette.sse import AppStatus
from starlette.types import Message

from app.api import sse
from app.api.openai.completions.response_builder import CompletionResponseBuilder
from app.api.openai.response_builder import DONE, chunk_events, common_fields
from app.api.openai.schemas.response_options import ResponseOptions
from app.api.sse import EventStream
from app.generation.job import build_job
from app.generation.params import GenerationParams
from app.generation.submit import submit
from batching.engine.streams.token_stream import Backlog
from tests.support.speaker import (
    ENDLESS_BLOCKS,
    MODEL_ID,
    Breaking,
    ByteTokenizer,
    served,
    served_endlessly,
)

pytestmark = pytest.mark.anyio

PATHS: Final = ["/v1/chat/completions", "/v1/completions"]


class Faulty(ByteTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise RuntimeError("a bug")


def data(body: str) -> list[str]:
    """Return what the events carry."""
    assert body.endswith("\n\n")
    events = body.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks(body: str) -> list[dict[str, Any]]:
    """Return the chunks before the terminator."""
    *events, last = data(body)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


async def test_a_chat_stream_is_openais() -> None:
    async with served("né!".encode()) as server:
        response = await server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = chunks(response.text)
    heads = [
        {key: part.pop(key) for key in ("id", "created", "system_fingerprint")} for part in parts
    ]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["id"].startswith("chatcmpl-")
    first = {"role": "assistant", "content": "", "refusal": None}
    deltas = [first, *({"content": c} for c in "né!"), {}]
    reasons = [None, None, None, None, "stop"]
    assert parts == [
        {
            "object": "chat.completion.chunk",
            "model": MODEL_ID,
            "service_tier": "default",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
        for delta, reason in zip(deltas, reasons, strict=True)
    ]


async def test_a_completion_stream_is_openais() -> None:
    async with served(b"ok") as server:
        response = await server.complete(stream=True)
    parts = chunks(response.text)
    assert [part.pop("object") for part in parts] == ["text_completion"] * 3
    assert [part["choices"] for part in parts] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("o", None), ("k", None), ("", "stop")]
    ]


@pytest.mark.parametrize("path", PATHS)
async def test_usage_comes_in_a_chunk_of_its_own(path: str) -> None:
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with served(b"ok") as server:
        response = await server.post(path, body | {"stream_options": {"include_usage": True}})
    *others, last = chunks(response.text)
    assert [other["usage"] for other in others] == [None] * len(others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 0}


async def test_a_stop_string_is_never_sent() -> None:
    async with served(b"one, two") as server:
        response = await server.chat(stream=True, stop=", t")
    parts = chunks(response.text)
    assert [part["choices"][0]["delta"].get("content") for part in parts] == [
        "", "o", "n", "e", None,
    ]  # fmt: skip
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


async def test_what_a_stop_string_held_back_comes_with_the_end() -> None:
    async with served(b"one, two") as server:
        response = await server.chat(stream=True, stop=", three", max_tokens=6)
    parts = chunks(response.text)
    contents = [part["choices"][0]["delta"].get("content") for part in parts]
    assert contents == ["", "o", "n", "e", ", t", None]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_failure_in_the_middle_is_an_event() -> None:
    async with served(b"ok", runner=Breaking) as server:
        response = await server.chat(stream=True)
    *_, error = chunks(response.text)
    assert response.status_code == 200
    assert error["error"]["type"] == "server_error"


async def test_a_bug_in_the_middle_is_an_event_and_its_place_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app")
    async with served_endlessly(Faulty(), late_head_ms=0) as server:
        response = await server.chat(stream=True)
        assert await server.num_unfinished() == 0
    *_, error = chunks(response.text)
    assert error["error"]["message"] == "the server failed while serving this request"
    assert "RuntimeError at api/test_stream.py:" in caplog.text
    # The message may quote what a client sent.
    assert "a bug" not in caplog.text
    assert "reason=failed" in caplog.text


# Clients that leave


class Client:
    """A connection to the app without a server; `left` says that the client has gone."""

    def __init__(self, path: str, **fields: Any) -> None:
        body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], **fields}
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        # Servers may send empty messages after the body's end.
        self._unread = [b"", json.dumps(body).encode()]
        self.left = asyncio.Event()
        self.got_event = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_event.set()


class LeavesAtHead(Client):
    """Goes while the head is on its way, so that the stream behind it never starts."""

    async def send(self, message: Message) -> None:
        await super().send(message)
        self.left.set()
        await asyncio.Event().wait()


class LeavesAtFirstEvent(Client):
    async def send(self, message: Message) -> None:
        await super().send(message)
        if message.get("body"):
            self.left.set()


class BreaksAtHead(Client):
    async def send(self, message: Message) -> None:
        raise OSError("connection reset")


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_before_a_whole_answer_ends_its_request(path: str) -> None:
    async with served_endlessly() as server:
        client = Client(path, max_tokens=200_000)
        client.left.set()
        await server.app(client.scope, client.receive, client.send)
        assert await server.num_unfinished() == 0
    assert client.sent[0]["status"] == 499


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_at_the_head_ends_its_request(path: str) -> None:
    async with served_endlessly() as server:
        client = LeavesAtHead(path, stream=True, max_tokens=200_000)
        await server.app(client.scope, client.receive, client.send)
        assert await server.num_unfinished() == 0
    assert [message["type"] for message in client.sent] == ["http.response.start"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_the_middle_ends_its_request(path: str) -> None:
    async with served_endlessly() as server:
        client = LeavesAtFirstEvent(path, stream=True, max_tokens=200_000)
        await server.app(client.scope, client.receive, client.send)
        assert await server.num_unfinished() == 0
    assert client.got_event.is_set()


async def test_a_connection_that_breaks_ends_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served_endlessly() as server:
        client = BreaksAtHead("/v1/chat/completions", stream=True)
        await server.app(client.scope, client.receive, client.send)
        assert await server.num_unfinished() == 0
    assert caplog.text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_cancelled_ends_its_request(stream: bool) -> None:
    async with served_endlessly() as server:
        client = Client("/v1/chat/completions", stream=stream)
        response = asyncio.create_task(server.app(client.scope, client.receive, client.send))
        await anyio.to_thread.run_sync(server.gate.reached.wait)
        response.cancel()
        with suppress(asyncio.CancelledError):
            await response
        assert not server.gate.was_given_up, "it waited for its engine"
        assert await server.num_unfinished() == 0


class ReadsLate(Client):
    """Takes no event but the first until it is told to."""

    def __init__(self, path: str, **fields: Any) -> None:
        super().__init__(path, **fields)
        self.may_read = asyncio.Event()

    async def send(self, message: Message) -> None:
        await super().send(message)
        if message.get("body"):
            await self.may_read.wait()


async def test_a_stream_that_is_not_read_holds_only_so_many_tokens() -> None:
    async with served(None, num_blocks=ENDLESS_BLOCKS, late_head_ms=0) as server:
        server.engine._backlog = Backlog(max_unread=40)
        client = ReadsLate("/v1/completions", stream=True, max_tokens=1000)
        response = asyncio.create_task(server.app(client.scope, client.receive, client.send))
        await client.got_event.wait()
        while await server.num_unfinished():
            pass
        client.may_read.set()
        await response
    *_, error, done, _ = b"".join(message.get("body", b"") for message in client.sent).split(
        b"\n\n"
    )
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "slow_reader"
    assert done + b"\n\n" == DONE


async def test_streams_go_on_when_the_server_is_asked_to_stop() -> None:
    assert not AppStatus.enable_automatic_graceful_drain


async def test_a_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer waits until a comment has come, so without one this would not end."""
    monkeypatch.setattr(sse, "PING_INTERVAL", 0.01)
    parts: list[bytes] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the client sends no second message")

    async with served_endlessly() as server:
        params = GenerationParams(max_tokens=2)
        job = build_job(server.engine, [[72]], params, completion_id="c", max_output_tokens=2)
        generation = await submit(server.engine, job, server.admitted())

        async def send(message: Message) -> None:
            parts.append(message.get("body", b""))
            if parts[-1].startswith(b":"):
                server.gate.open()

        builder = CompletionResponseBuilder(
            common_fields=common_fields("cmpl-1", "m"),
            options=ResponseOptions(),
            prompts=job.prompts,
            token_bytes=server.engine.grammars.token_bytes,
            num_returned=1,
            num_candidates=1,
        )
        request = Request({"type": "http", "app": server.app})
        stream = EventStream(chunk_events(request, generation, builder))
        await stream({"type": "http", "method": "POST"}, receive, send)
    assert any(part.startswith(b":") for part in parts)
    assert b"".join(parts).endswith(DONE)
