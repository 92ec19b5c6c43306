"""`/v1/responses` over a WebSocket, as OpenAI's mode for agents: a connection for a conversation.

Each `response.create` is a request of its own, which passes all that a POST passes; its events come as messages.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import anyio
from fastapi import APIRouter, WebSocket
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message

from app.api.openai.responses.stored.own import LATEST
from app.api.openai.responses.stored.references import LatestResponse
from app.http.inner_call import post
from app.http.json_body import read_json
from app.http.streams.late_head import HEAD_DUE

router = APIRouter()

PATH: Final = "/v1/responses"
# Requests that wait for those before them.
_MAX_WAITING: Final = 16

# What the request that opens the connection says for all that follow.
_KEPT: Final = frozenset(
    {b"authorization", b"x-api-key", b"host", b"origin", b"sec-fetch-site", b"user-agent"}
)
_END: Final = b"\n\n"


class Refused(Exception):
    """A message that is not answered by a response."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    def event(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status == 400 else "rate_limit_error"
        error = {"type": kind, "code": None, "message": str(self), "param": self.param}
        return {"type": "error", "status": self.status, "error": error}


@router.websocket(PATH)
async def connect(socket: WebSocket) -> None:
    """Respond to one `response.create` after the other, until the client leaves."""
    await socket.accept()
    conversation = SocketConversation(socket)
    serving = asyncio.create_task(conversation.serve())
    try:
        await conversation.receive()
    finally:
        serving.cancel()
        # What is being sent fails, too, when the client leaves.
        await asyncio.gather(serving, return_exceptions=True)


class SocketConversation:
    """The requests of one connection, which are served in their order."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._headers = [(name, value) for name, value in socket.scope["headers"] if name in _KEPT]
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._num_bytes = 0
        self._latest = LatestResponse()

    async def receive(self) -> None:
        """Take the messages of the client until it leaves."""
        while (received := await self._socket.receive())["type"] == "websocket.receive":
            text = received.get("text")
            message: bytes = received["bytes"] if text is None else text.encode()
            if self._waiting.full() or self._num_bytes + len(message) > self._max_bytes:
                what = "too many requests wait for their turn on this connection"
                await self._send(to_json(Refused(what, status=429).event()))
                continue
            self._num_bytes += len(message)
            self._waiting.put_nowait(message)

    async def serve(self) -> None:
        while True:
            message = await self._waiting.get()
            try:
                await self._respond(message)
            finally:
                self._num_bytes -= len(message)

    @property
    def _max_bytes(self) -> int:
        max_bytes: int = self._socket.app.state.service.settings.max_body_bytes
        return max_bytes

    async def _respond(self, message: bytes) -> None:
        try:
            body = await anyio.to_thread.run_sync(request_in, message)
        except Refused as refused:
            await self._send(to_json(refused.event()))
            return
        if body is not None:
            app: ASGIApp = self._socket.app
            messages = ResponseMessages(self)
            state = {LATEST: self._latest, HEAD_DUE: 0.0}
            await post(app, PATH, body, messages.send, headers=self._headers, state=state)

    async def _send(self, event: bytes) -> None:
        await self._socket.send_text(event.decode())

    async def send_events(self, events: Sequence[bytes]) -> None:
        for event in events:
            await self._send(event)

    async def fail(self, status: int, body: bytes) -> None:
        """Send the error of a request; what it would have gone on from is forgotten, as OpenAI does."""
        self._latest.response_id, self._latest.stored = "", None
        error = json.loads(body)["error"]
        await self._send(to_json({"type": "error", "status": status, "error": error}))


class ResponseMessages:
    """Turns the messages of one HTTP response into those of the WebSocket."""

    def __init__(self, conversation: SocketConversation) -> None:
        self._conversation = conversation
        self._status = 0
        self._is_stream = False
        self._rest = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            self._is_stream = headers[b"content-type"].startswith(b"text/event-stream")
            return
        body = self._rest + message.get("body", b"")
        if self._is_stream:
            *frames, self._rest = body.split(_END)
            await self._conversation.send_events([*filter(None, map(_data_of, frames))])
        elif message.get("more_body", False):
            self._rest = body
        else:
            await self._conversation.fail(self._status, body)


def request_in(message: bytes) -> bytes | None:
    """Return the body of the request that a message asks for; None if it asks for nothing; blocking.

    Raises:
        Refused: it is none that is served here.
    """
    try:
        fields = read_json(message)
    except json.JSONDecodeError as error:
        raise Refused(f"the message is not valid JSON: {error}") from None
    except HTTPException as error:
        raise Refused(error.detail) from None
    if not isinstance(fields, dict):
        raise Refused("a message must be an object")
    kind = fields.pop("type", None)
    if kind == "response.processed":
        # Codex tells that it has what was sent.
        return None
    if kind != "response.create":
        raise Refused("only response.create is supported", "type")
    if fields.get("background"):
        raise Refused("this is not supported over a WebSocket", "background")
    if fields.get("stream_id") is not None:
        raise Refused("a connection has one stream; open another one beside it", "stream_id")
    return json.dumps(fields | {"stream": True}).encode()


def _data_of(frame: bytes) -> bytes:
    """Return the data of an event; nothing of a comment."""
    return b"".join(line[6:] for line in frame.split(b"\n") if line.startswith(b"data: "))
