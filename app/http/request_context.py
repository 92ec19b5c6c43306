"""What holds for every request: it has an id, it is counted, and it ends with an answer."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors import CLIENT_CLOSED_REQUEST, error_response
from app.observability.logs import logfmt, summarize_exception

logger = logging.getLogger(__name__)

# Whoever watches over the server asks these, also while it shuts down.
_UNCOUNTED: Final = frozenset({"/health", "/ready", "/metrics"})

# Nothing that ends a header or a line of a log.
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")


class InFlightRequests:
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


class RequestContextMiddleware:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, in_flight: InFlightRequests) -> None:
        self._app = app
        self._open_requests = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        with self._open_requests.counting(scope["path"]):
            await self._answer(request_id, scope, receive, send)

    async def _answer(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = has_gone = False

        async def send_named(message: Message) -> None:
            nonlocal has_started, has_gone
            if message["type"] == "http.response.start":
                has_started = True
                _log_refusal(request_id, scope, message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            try:
                await send(message)
            except OSError:
                has_gone = True
                raise

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            if has_gone:
                return
            logger.error("request %s failed: %s", request_id, summarize_exception(error))
            # A response without its end is one that the server closes the connection over.
            if not has_started:
                await error_response(error)(scope, receive, send_named)


def _log_refusal(request_id: str, scope: Scope, status: int) -> None:
    """Log a request that was turned away; what was taken on has a line of its own at its end."""
    is_refusal = 400 <= status < 500 or status == 503
    if is_refusal and status != CLIENT_CLOSED_REQUEST and scope["path"] not in _UNCOUNTED:
        fields = {"request_id": request_id, "method": scope["method"], "status": status}
        logger.info("%s", logfmt(fields), extra={"fields": fields})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            wanted: bytes = value
            return wanted.decode("ascii")
    return f"req-{uuid4().hex}"
