"""A request ends when its client leaves, and lets go of what it holds however it ends."""

import asyncio

import pytest
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.request_lifetime import RequestLifetime, held_by

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"a", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"z"}


class Handler:
    """An app that holds something, and then does what it is made for."""

    def __init__(self) -> None:
        self.num_held = 0
        self.is_waiting = asyncio.Event()
        self.has_gone_on = False
        self._messages: list[Message] = []
        self._error: Exception | None = None

    def sending(self, *messages: Message) -> "Handler":
        self._messages += messages
        return self

    def failing(self, error: Exception) -> "Handler":
        self._error = error
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_held += 1
        held_by(Request(scope)).callback(self._release)
        assert (await receive())["type"] == "http.request"
        for message in self._messages:
            await send(message)
        if self._error is not None:
            raise self._error
        self.is_waiting.set()
        if not self._messages or self._messages[-1].get("more_body", False):
            await receive()
        # What follows a complete response is not cancelled.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.has_gone_on = True

    def _release(self) -> None:
        self.num_held -= 1


class Client:
    """Sends a request in pieces, and leaves when it is told to."""

    def __init__(self, *bodies: bytes) -> None:
        last = len(bodies) - 1
        self._unread: list[Message] = [
            {"type": "http.request", "body": body, "more_body": index < last}
            for index, body in enumerate(bodies)
        ]
        self.left = asyncio.Event()
        self.received: list[Message] = []

    async def receive(self) -> Message:
        if self._unread:
            return self._unread.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.received.append(message)
        if message == END:
            # As a server says that the response is complete.
            self.left.set()

    async def ask(self, app: ASGIApp, path: str = "/a") -> None:
        await RequestLifetime(app, {"/files"})(
            {"type": "http", "method": "POST", "path": path}, self.receive, self.send
        )


async def test_a_client_that_leaves_ends_its_request() -> None:
    handler, client = Handler(), Client(b"")
    asking = asyncio.create_task(client.ask(handler))
    await handler.is_waiting.wait()
    assert handler.num_held == 1
    client.left.set()
    await asking
    assert (handler.num_held, handler.has_gone_on) == (0, False)
    assert [message.get("status") for message in client.received] == [499, None]


async def test_one_that_leaves_in_the_response_gets_no_other() -> None:
    handler, client = Handler().sending(START, PART), Client(b"{", b"}")
    asking = asyncio.create_task(client.ask(handler))
    await handler.is_waiting.wait()
    client.left.set()
    await asking
    assert (handler.num_held, handler.has_gone_on) == (0, False)
    assert client.received == [START, PART]


async def test_one_that_has_left_before_is_not_served() -> None:
    handler, client = Handler(), Client()
    client.left.set()
    await client.ask(handler)
    assert (handler.num_held, handler.is_waiting.is_set()) == (0, False)
    assert client.received[0]["status"] == 499


async def test_a_complete_response_is_not_cancelled() -> None:
    handler, client = Handler().sending(START, END), Client(b"")
    await client.ask(handler)
    assert (handler.num_held, handler.has_gone_on) == (0, True)
    assert client.received == [START, END]


async def test_an_exception_anywhere_loses_nothing() -> None:
    handler, client = Handler().failing(ValueError("a bug")), Client(b"")
    with pytest.raises(ValueError, match="a bug"):
        await client.ask(handler)
    assert handler.num_held == 0


async def test_a_handler_that_reads_the_body_itself_sees_the_disconnect() -> None:
    handler, client = Handler(), Client(b"")
    client.left.set()
    await client.ask(handler, "/files")
    assert (handler.num_held, handler.has_gone_on) == (0, True)
