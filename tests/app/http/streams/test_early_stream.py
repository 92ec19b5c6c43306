"""A stream that begins before its handler has a response."""

import pytest
from fastapi import Request
from starlette.types import Message, Scope

from app.http.streams.early_stream import EarlyStream, early_stream

pytestmark = pytest.mark.anyio

EVENTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
ERROR: Message = {
    "type": "http.response.start",
    "status": 503,
    "headers": [(b"content-type", b"application/json")],
}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Sent:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.scope: Scope = {"type": "http", "state": {}}
        self.stream = EarlyStream(self.scope, self.send)

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


async def test_without_a_comment_a_response_is_what_the_handler_sends() -> None:
    for start in (EVENTS, ERROR):
        sent = Sent()
        for message in (start, part(b"a"), part(b"", more=False)):
            await sent.stream.send(message)
        assert sent.messages == [start, part(b"a"), part(b"", more=False)]


async def test_the_handlers_stream_continues_the_one_that_has_begun() -> None:
    sent = Sent()
    assert early_stream(Request(sent.scope)) is sent.stream
    for _ in range(2):
        await sent.stream.comment("wait")
    for message in (EVENTS, part(b"data: 1\n\n"), part(b"", more=False)):
        await sent.stream.send(message)
    assert [m["type"] for m in sent.messages].count("http.response.start") == 1
    assert dict(sent.messages[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert sent.bodies == [b": wait\n\n", b": wait\n\n", b"data: 1\n\n", b""]
    assert not sent.messages[-1]["more_body"]


async def test_an_error_becomes_the_last_event_of_a_stream_that_has_begun() -> None:
    sent = Sent()
    await sent.stream.comment("wait")
    for message in (ERROR, part(b'{"error":\n'), part(b"1}", more=False)):
        await sent.stream.send(message)
    assert sent.bodies == [b": wait\n\n", b'event: error\ndata: {"error": 1}\n\n']
    assert not sent.messages[-1]["more_body"]
