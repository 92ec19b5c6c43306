"""Middleware for every request: its id, the number of requests in flight, responses to exceptions."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors.formats import is_anthropic
from app.http.errors.responses import (
    CLIENT_CLOSED_REQUEST,
    CountRejection,
    error_response,
    ignore_rejection,
)
from app.observability.logs import logfmt, summarize_exception

logger = logging.getLogger(__name__)

# Probes need no key.
PROBE_PATHS: Final = frozenset({"/health", "/ready"})
# Monitoring goes on during a shutdown, and does not delay it.
_MONITORING_PATHS: Final = PROBE_PATHS | {
    *("/metrics", "/load", "/version", "/server/events", "/models/sse")
}

# In a log line; h11 takes one of 32 KB.
_MAX_METHOD: Final = 16
# The first name of a field at fault is one of the API's; those below it may be keys that a client chose.
_FIELD: Final = re.compile(r"([A-Za-z_-]{1,32})(?![^.\[])")

# No characters that end a header or a log line.
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")


class InFlightRequests:
    """Counts the requests in flight, for which a shutdown waits."""

    def __init__(self) -> None:
        self.num_open = 0

    @contextmanager
    def counting(self, path: str) -> Iterator[None]:
        """Count a request while the block runs, unless it is for monitoring."""
        counts = path not in _MONITORING_PATHS
        self.num_open += counts
        try:
            yield
        finally:
            self.num_open -= counts


class RequestContextMiddleware:
    """The outermost middleware except for CORS: assigns request ids and responds to exceptions."""

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlightRequests,
        count_rejection: CountRejection = ignore_rejection,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._count_rejection = count_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        with self._in_flight.counting(scope["path"]):
            await self._respond(request_id, scope, receive, send)

    async def _respond(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = is_disconnected = False
        rejected_with: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal has_started, is_disconnected, rejected_with
            if message["type"] == "http.response.start":
                has_started = True
                if _is_rejection(scope, message["status"]):
                    rejected_with = message["status"]
                names = (b"x-request-id", *_own_names(scope))
                ids = [(name, request_id.encode()) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            elif rejected_with is not None:
                _log_rejection(request_id, scope, rejected_with, message.get("body", b""))
                rejected_with = None
            try:
                await send(message)
            except OSError:
                is_disconnected = True
                if rejected_with is not None:
                    _log_rejection(request_id, scope, rejected_with, b"")
                raise

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if is_disconnected:
                return
            logger.error("request %s failed: %s", request_id, summarize_exception(error))
            # The server closes the connection of a response that has started and does not end.
            if not has_started:
                response = error_response(error, scope, self._count_rejection)
                await response(scope, receive, send_with_id)


def _own_names(scope: Scope) -> tuple[bytes, ...]:
    """Return what an API calls the header beside `x-request-id`; Anthropic's SDKs read `request-id`."""
    return (b"request-id",) if is_anthropic(scope) else ()


def _is_rejection(scope: Scope, status: int) -> bool:
    """Return whether a request is logged as rejected; an accepted one is logged when it ends."""
    is_monitoring = scope["path"] in _MONITORING_PATHS
    is_rejection = 400 <= status < 500 or status == 503
    return is_rejection and status != CLIENT_CLOSED_REQUEST and not is_monitoring


def _log_rejection(request_id: str, scope: Scope, status: int, body: bytes) -> None:
    """Log a rejected request, without any text of its client."""
    fields = {
        "request_id": request_id,
        "method": scope["method"][:_MAX_METHOD],
        # The template: the path itself may have anything in it.
        "route": getattr(scope.get("route"), "path", None),
        "status": status,
        **_fault(body),
    }
    logger.info("%s", logfmt(fields), extra={"fields": fields})


def _fault(body: bytes) -> dict[str, str | None]:
    """Return the members of the body of an error, without its message."""
    try:
        error = json.loads(body)["error"]
        field = _FIELD.match(error.get("param") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        # It is none of `error_response`.
        return {"code": None, "param": None}
    # Anthropic's errors have a type only, and so have many of OpenAI's.
    return {"code": error.get("code") or error.get("type"), "param": field and field[1]}


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            wanted: bytes = value
            return wanted.decode("ascii")
    return f"req-{uuid4().hex}"
