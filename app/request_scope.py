"""What holds for every request: it has an id, it is counted, and it ends with an answer."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary, walk_tb
from typing import Final
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import error_response

logger = logging.getLogger(__name__)

# Whoever watches over the server asks these, also while it shuts down.
_UNCOUNTED: Final = frozenset({"/health", "/ready", "/metrics"})

# Nothing that ends a header or a line of a log.
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")

# How much of an exception is told: frames, the innermost ones, and exceptions behind it.
_MAX_FRAMES: Final = 12
_MAX_DEPTH: Final = 3


class OpenRequests:
    """Counts the requests that a shutdown waits for."""

    def __init__(self) -> None:
        self.num_open = 0

    @contextmanager
    def counting(self, path: str) -> Iterator[None]:
        """Count a request while the body runs, unless it asks how the server is."""
        counts = path not in _UNCOUNTED
        self.num_open += counts
        try:
            yield
        finally:
            self.num_open -= counts


class RequestScope:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, open_requests: OpenRequests) -> None:
        self._app = app
        self._open_requests = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        with self._open_requests.counting(scope["path"]):
            await self._answer(request_id, scope, receive, send)

    async def _answer(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            logger.error("request %s failed: %s", request_id, outline(error))
            # A response without its end is one that the server closes the connection over.
            if not has_started:
                await error_response(error)(scope, receive, send_named)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            wanted: bytes = value
            return wanted.decode("ascii")
    return f"req-{uuid4().hex}"


def outline(error: BaseException, depth: int = _MAX_DEPTH) -> str:
    """Return the type of an exception and where it came from, innermost first, in one line.

    Not its message, which may hold what a client sent.
    """
    frames = StackSummary.extract(
        walk_tb(error.__traceback__), limit=-_MAX_FRAMES, lookup_lines=False
    )
    places = " < ".join(
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )
    behind = [outline(e, depth - 1) for e in _behind(error)] if depth > 1 else []
    return "; from ".join([f"{type(error).__qualname__} at {places}", *behind])


def _behind(error: BaseException) -> list[BaseException]:
    """Return the exceptions that led to one."""
    if isinstance(error, BaseExceptionGroup):
        return list(error.exceptions[:_MAX_DEPTH])
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return [] if cause is None else [cause]
