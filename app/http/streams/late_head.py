"""The head of a streamed response, which waits for what is generated: until then another server may take the request."""

import asyncio
from typing import Final

from starlette.types import Message, Scope, Send

# In a request's state: when its head is due, on the event loop's clock; 0 is at once.
HEAD_DUE: Final = "head_due"


class Opening(bytes):
    """A frame of a stream behind which nothing is generated yet."""


class LateHead:
    """Sends the messages of a stream; the head is held, and frames on demand, until another one follows or `begin`.

    Until then the response can still be another one.  What is held goes out in one piece with that frame.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._due: float = scope.get("state", {}).get(HEAD_DUE, 0.0)
        self._send = send
        # None once the head is sent.
        self._held: list[Message] | None = [] if self.time_left > 0 else None
        # The head may be due while a frame comes.
        self._lock = asyncio.Lock()

    @property
    def time_left(self) -> float:
        """Seconds until the head is due."""
        return max(0.0, self._due - asyncio.get_running_loop().time())

    @property
    def has_begun(self) -> bool:
        return self._held is None

    def hold(self, frame: bytes) -> bool:
        """Hold a frame; return False if the head is sent, and so the frame must be."""
        if self._held is None:
            return False
        self._held.append({"type": "http.response.body", "body": frame, "more_body": True})
        return True

    async def begin(self) -> None:
        """Send what is held."""
        async with self._lock:
            await self._release()

    async def send(self, message: Message) -> None:
        async with self._lock:
            if self._held is None:
                await self._send(message)
                return
            self._held.append(message)
            if message["type"] == "http.response.body":
                await self._release()

    async def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            head, *bodies = held
            await self._send(head)
            if bodies:
                await self._send({**bodies[-1], "body": b"".join(each["body"] for each in bodies)})
