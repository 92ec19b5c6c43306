"""The head of a stream: it waits with what comes before the first frame of an answer."""

import asyncio
from typing import Final

import pytest
from starlette.types import Message

from app.http.streams.late_head import HEAD_DUE, LateHead
from tests.support.raw_http import timers_have_fired

pytestmark = pytest.mark.anyio

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}
FAR: Final = 1e9


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Sent:
    """What the server has of a stream whose head is due at `due`; `may_send` is cleared to hold it up."""

    def __init__(self, due: float | None = FAR) -> None:
        self.messages: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.head = LateHead({} if due is None else {"state": {HEAD_DUE: due}}, self._send)

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.messages.append(message)


async def test_what_is_held_comes_in_one_piece_with_the_first_frame() -> None:
    sent = Sent()
    await sent.head.send(HEAD)
    assert all(sent.head.hold(frame) for frame in (b"a", b"b"))
    assert not sent.messages
    assert not sent.head.has_begun
    await sent.head.send(part(b"c"))
    assert sent.messages == [HEAD, part(b"abc")]
    assert sent.head.has_begun
    assert not sent.head.hold(b"d")
    await sent.head.send(part(b"d"))
    assert sent.messages[2:] == [part(b"d")]


async def test_a_head_that_is_due_takes_along_what_there_is() -> None:
    for frames in ([], [b"a"]):
        sent = Sent()
        await sent.head.send(HEAD)
        assert all(sent.head.hold(frame) for frame in frames)
        for _ in range(2):
            await sent.head.begin()
        assert sent.messages == [HEAD, *map(part, frames)]


async def test_a_stream_without_frames_is_sent_whole() -> None:
    sent = Sent()
    await sent.head.send(HEAD)
    assert sent.head.hold(b"a")
    await sent.head.send(part(b"", more=False))
    assert sent.messages == [HEAD, part(b"a", more=False)]


async def test_nothing_is_held_when_the_head_is_due_at_once() -> None:
    for due in (0.0, None):
        sent = Sent(due)
        assert sent.head.has_begun
        assert sent.head.time_left == 0
        await sent.head.send(HEAD)
        assert sent.messages == [HEAD]
        assert not sent.head.hold(b"a")


async def test_it_is_due_before_it_is_on_its_way() -> None:
    sent = Sent()
    await sent.head.begin()
    await sent.head.send(HEAD)
    assert sent.messages == [HEAD]


async def test_a_frame_waits_for_a_head_that_is_on_its_way() -> None:
    sent = Sent()
    await sent.head.send(HEAD)
    assert sent.head.hold(b"a")
    sent.may_send.clear()
    beginning = asyncio.create_task(sent.head.begin())
    frame = asyncio.create_task(sent.head.send(part(b"b")))
    await timers_have_fired()
    assert sent.head.has_begun
    sent.may_send.set()
    await asyncio.gather(frame, beginning)
    assert sent.messages == [HEAD, part(b"a"), part(b"b")]
