"""The budget of large bodies that are not read yet: what counts, who waits, and who makes room."""

import asyncio
from collections.abc import Callable
from typing import Final

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http.streams.unsent_bytes import UnsentBytes
from tests.support.raw_http import timers_have_fired

pytestmark = pytest.mark.anyio

PIECE: Final = 64 << 10
LARGE: Final = 3 * PIECE
START: Final[Message] = {"type": "http.response.start", "status": 200, "headers": []}


def head_of(num_bytes: int) -> Message:
    return {**START, "headers": [(b"content-length", str(num_bytes).encode())]}


def part(body: bytes, *, more_body: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


class Client:
    """A client that takes a message of a response at a time; after an abort it takes all of them."""

    def __init__(self, unsent: UnsentBytes, *messages: Message) -> None:
        self._messages = messages
        self.taken: list[Message] = []
        self.is_aborted = False
        self._may_take = asyncio.Semaphore(0)
        app = unsent.in_pieces(self._respond, self._abort)
        self.response = asyncio.ensure_future(app({"type": "http"}, self._receive, self._send))

    async def take(self, num_messages: int) -> None:
        for _ in range(num_messages):
            self._may_take.release()
        await settled()

    def _abort(self) -> None:
        self.is_aborted = True
        for _ in range(1000):
            self._may_take.release()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        for message in self._messages:
            await send(message)

    async def _receive(self) -> Message:
        raise AssertionError("nothing is received")

    async def _send(self, message: Message) -> None:
        await self._may_take.acquire()
        self.taken.append(message)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def settled() -> None:
    """Return when all that can go on has done so."""
    for _ in range(20):
        await timers_have_fired()


async def sizes(*messages: Message) -> list[int]:
    """Return the sizes of the pieces in which a response is sent, without its head."""
    client = Client(UnsentBytes(), *messages)
    await client.take(1000)
    await client.response
    assert client.taken[0]["type"] == "http.response.start"
    body = b"".join(message.get("body", b"") for message in client.taken)
    assert body == b"".join(message.get("body", b"") for message in messages)
    more = [message["more_body"] for message in client.taken[1:]]
    assert more == [True] * (len(more) - 1) + [False]
    return [len(message["body"]) for message in client.taken[1:]]


async def test_a_large_body_is_sent_in_pieces() -> None:
    small = bytes(PIECE)
    assert await sizes(head_of(PIECE), part(small)) == [PIECE]
    assert await sizes(head_of(PIECE + 1), part(small + b"x")) == [PIECE, 1, 0]
    assert await sizes(START, part(small + b"x", more_body=True), part(b"")) == [PIECE, 1, 0, 0]
    # At most so many that it may take a minute.
    assert await sizes(head_of(128 * PIECE), part(128 * small)) == [*[2 * PIECE] * 64, 0]


async def test_a_file_is_read_in_pieces_already() -> None:
    small = bytes(PIECE)
    messages = (head_of(2 * PIECE), part(small, more_body=True), part(small))
    assert await sizes(*messages) == [PIECE, PIECE]


async def test_a_body_counts_until_its_client_has_taken_all_of_it() -> None:
    unsent = UnsentBytes()
    client = Client(unsent, head_of(LARGE), part(bytes(LARGE)))
    await settled()
    # Also where the head is not taken, since the response before is not.
    assert unsent.num_bytes == LARGE
    await client.take(1 + 3)
    assert unsent.num_bytes == LARGE
    await client.take(1)
    assert unsent.num_bytes == 0


async def test_a_small_one_does_not_count() -> None:
    unsent = UnsentBytes()
    client = Client(unsent, head_of(PIECE), part(bytes(PIECE)))
    await settled()
    assert unsent.num_bytes == 0
    await client.take(2)


async def test_a_body_of_a_client_that_leaves_does_not_count() -> None:
    unsent = UnsentBytes()
    client = Client(unsent, head_of(LARGE), part(bytes(LARGE)))
    await settled()
    client.response.cancel()
    await asyncio.wait([client.response])
    assert unsent.num_bytes == 0


async def test_a_keep_alive_event_comes_before_or_after_another_event() -> None:
    taken: list[bytes] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        taken.append(message["body"])

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        event, ping = part(b"a" * LARGE, more_body=True), part(b"ping", more_body=True)
        await asyncio.gather(send(event), send(ping))

    async def receive() -> Message:
        raise AssertionError("nothing is received")

    app = UnsentBytes().in_pieces(respond, lambda: None)
    await app({"type": "http"}, receive, send)
    assert b"".join(taken) == b"a" * LARGE + b"ping"


def writing(unsent: UnsentBytes, num_bytes: int | None = None) -> "asyncio.Task[str]":
    return asyncio.ensure_future(unsent.write(lambda: "written", num_bytes))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await timers_have_fired()


async def test_a_large_one_is_written_when_others_have_been_read() -> None:
    unsent = UnsentBytes(LARGE, Clock())
    client = Client(unsent, head_of(LARGE), part(bytes(LARGE)))
    await settled()
    large, unknown, small = writing(unsent, PIECE + 1), writing(unsent), writing(unsent, PIECE)
    assert await small == "written"
    await client.take(1 + 3)
    assert not large.done()
    assert not unknown.done()
    await client.take(1)
    assert await large == await unknown == "written"
    assert not client.is_aborted


async def test_the_one_that_stands_still_for_longest_makes_room() -> None:
    clock = Clock()
    unsent = UnsentBytes(2 * LARGE, clock, patience=10)
    first, second = (Client(unsent, head_of(LARGE), part(bytes(LARGE))) for _ in range(2))
    await settled()
    clock.now = 5
    await first.take(2)
    clock.now = 12
    assert await writing(unsent) == "written"
    assert second.is_aborted
    assert not first.is_aborted
    await second.response
    assert unsent.num_bytes == LARGE


async def test_one_that_is_waited_for_has_its_time() -> None:
    """The time passes for real; the one that is aborted here would wait for ever."""
    unsent = UnsentBytes(LARGE, patience=0.01)
    client = Client(unsent, head_of(LARGE), part(bytes(LARGE)))
    await settled()
    assert await writing(unsent) == "written"
    assert client.is_aborted
