"""The life of a request: it ends when its client leaves, and lets go of all that it holds in the end."""

import asyncio
from collections.abc import Container
from contextlib import ExitStack
from typing import Final

import anyio
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors.responses import CLIENT_CLOSED_REQUEST
from app.http.streams.early_stream import EarlyStream
from app.http.streams.late_head import HEAD_DUE

_HELD: Final = "held"


def held_by(request: Request) -> ExitStack:
    """Return what a request holds: callbacks that are called, the last first, however it ends.

    They must not wait, and may be called when there is nothing left to release.  `pop_all` takes all of it
    over for what outlives the request.
    """
    held: ExitStack = request.scope["state"][_HELD]
    return held


class RequestLifetime:
    """Cancels a request whose client has left, at any stage, and then releases what it holds.

    It is the innermost middleware and the one place that listens for a disconnect: where a handler
    waits, be it for a worker thread, the engine or the client, makes no difference to it.  Once the last
    part of the response is sent, there is nothing left to cancel.

    A request is in no other hands: its handler passes all that it acquires to `held_by`, and an exception between
    two steps of it, or between the handler and its response, loses nothing.
    """

    def __init__(self, app: ASGIApp, streamed: Container[str] = (), late_head: float = 0.0) -> None:
        """Wrap an app.

        streamed: paths to which bodies are posted that their handlers read: these see a disconnect.
        late_head: seconds after which the head of a stream is due.
        """
        self._app = app
        self._streamed = streamed
        self._late_head = late_head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            state = scope.setdefault("state", {})
            state[_HELD] = held
            state.setdefault(HEAD_DUE, asyncio.get_running_loop().time() + self._late_head)
            if scope["method"] == "POST" and scope["path"] in self._streamed:
                await self._app(scope, receive, send)
            elif not await self._serve(scope, receive, send):
                # For the log; no client reads it.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Call the app; return False if the client has left before the response began."""
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
        if messages[-1]["type"] == "http.disconnect":
            return False
        has_started = False
        with anyio.CancelScope() as cancel_scope:
            listener = asyncio.create_task(_cancel_at_disconnect(receive, cancel_scope))

            async def send_and_listen(message: Message) -> None:
                nonlocal has_started
                has_started = True
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    listener.cancel()
                await send(message)

            early = EarlyStream(scope, send_and_listen)
            try:
                await self._app(scope, _replayed(messages), early.send)
            finally:
                listener.cancel()
        return has_started or not cancel_scope.cancelled_caught


async def _cancel_at_disconnect(receive: Receive, cancel_scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel_scope.cancel()


def _replayed(messages: list[Message]) -> Receive:
    """Return a `receive` for a request that is all there; a disconnect cancels the request instead."""
    rest = iter(messages)

    async def receive() -> Message:
        if (message := next(rest, None)) is not None:
            return message
        disconnect: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await disconnect

    return receive
