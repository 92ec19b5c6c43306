"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from app.http.rejections import (
    BodyTooLarge,
    BodyTooSlow,
    QueueFull,
    QuotaExceeded,
    Rejection,
    ShuttingDown,
    Unauthorized,
    Unavailable,
)
from batching import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineStalled,
    EngineStopped,
    ModelLoadError,
    ModelNotFound,
    RequestError,
    RequestFailed,
)

logger = logging.getLogger(__name__)

# Limits in characters for text of the client that a message repeats.
_MAX_MESSAGE: Final = 500
_MAX_PARAM: Final = 100


class ErrorSpec(NamedTuple):
    """The response to an exception; `message` replaces a text that clients should not see."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    message: str | None = None


ERROR_SPECS: Final[dict[type[BaseException], ErrorSpec]] = {
    ContextLengthExceeded: ErrorSpec(400, code="context_length_exceeded"),
    RequestError: ErrorSpec(400),
    ModelNotFound: ErrorSpec(404, code="model_not_found"),
    RequestFailed: ErrorSpec(500, "server_error"),
    EngineStopped: ErrorSpec(503, "server_error"),
    EngineStalled: ErrorSpec(503, "server_error", "engine_stalled"),
    DeadlineExceeded: ErrorSpec(504, "timeout_error", "deadline_exceeded"),
    Unauthorized: ErrorSpec(401, code="invalid_api_key"),
    BodyTooLarge: ErrorSpec(413, code="request_too_large"),
    BodyTooSlow: ErrorSpec(408, code="request_timeout"),
    QuotaExceeded: ErrorSpec(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: ErrorSpec(503, "server_error", "queue_full"),
    ShuttingDown: ErrorSpec(503, "server_error", "shutting_down"),
    Unavailable: ErrorSpec(503, "server_error", "unavailable"),
    # Its message is for the operator: it may contain paths of this machine.
    ModelLoadError: ErrorSpec(500, "server_error", None, "the model cannot be loaded"),
    Exception: ErrorSpec(500, "server_error", None, "the server failed while serving this request"),
}


# nginx's status for a client that disconnected; it is never received, and not logged.
CLIENT_CLOSED_REQUEST: Final = 499

# The codes that count as rejections by admission control: every 429, and 503 for lack of capacity.
REJECTION_REASONS: Final = ("queue_full", "rate_limit_exceeded", "shutting_down")


CountRejection = Callable[[str], None]


def ignore_rejection(code: str) -> None:
    """Count nothing."""


def error_spec(error: Exception) -> ErrorSpec:
    """Return the entry of the nearest class that has one."""
    return next(ERROR_SPECS[cls] for cls in type(error).__mro__ if cls in ERROR_SPECS)


def envelope(
    message: str, kind: str, *, param: str | None = None, code: str | None = None, **extra: int
) -> str:
    """Return the body of an error.

    It is ASCII: a lone surrogate from a request cannot be encoded otherwise.
    """
    error: dict[str, Any] = {
        "message": message[:_MAX_MESSAGE],
        "type": kind,
        "param": None if param is None else param[:_MAX_PARAM],
        "code": code,
    }
    return json.dumps({"error": error | extra})


def error_body(error: Exception) -> str:
    """Return the body for an exception, of a response or of an event."""
    spec = error_spec(error)
    message = str(error) if spec.message is None else spec.message
    param = error.param if isinstance(error, RequestError) else None
    extra: dict[str, int] = {}
    if isinstance(error, ContextLengthExceeded):
        # llama.cpp's keys: agents use these numbers to shorten their history.
        extra = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.limit}
    return envelope(message, spec.type, param=param, code=spec.code, **extra)


def headers_for(error: Exception) -> dict[str, str]:
    """Return the header fields that depend on the exception."""
    headers: dict[str, str] = {}
    if isinstance(error, Rejection) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients retry after a 5xx, but the time that the client set is over.
        headers["X-Should-Retry"] = "false"
    return headers


def error_response(error: Exception, count_rejection: CountRejection) -> Response:
    """Return the response to an exception, and count it if it is a rejection.

    All responses to exceptions are made here, so no rejection is missed: the exception handlers
    return them, and middleware, which runs outside of those, sends them.
    """
    spec = error_spec(error)
    if spec.code in REJECTION_REASONS:
        count_rejection(spec.code)
    return Response(
        error_body(error), spec.status, headers_for(error), media_type="application/json"
    )


def register_handlers(app: FastAPI, count_rejection: CountRejection = ignore_rejection) -> None:
    """Register the responses to expected exceptions.

    `app/http/request_context.py` responds to unexpected ones.
    """

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, ModelLoadError):
            logger.error("%s", error)
        return error_response(error, count_rejection)

    app.add_exception_handler(RequestValidationError, _respond_to_validation_error)
    app.add_exception_handler(HTTPException, _respond_to_http_exception)
    app.add_exception_handler(EngineError, respond)
    app.add_exception_handler(Rejection, respond)


def _response(status: int, body: str) -> Response:
    return Response(body, status, media_type="application/json")


async def _respond_to_http_exception(request: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)  # the handler is registered for this class
    message, code = error.detail, None
    if error.status_code == 404:
        message, code = f"there is no {request.url.path} here", "unknown_url"
    elif error.status_code == 405:
        message = f"{request.url.path} does not allow the method {request.method}"
        code = "method_not_supported"
    response = _response(error.status_code, envelope(message, "invalid_request_error", code=code))
    response.headers.update(error.headers or {})
    return response


async def _respond_to_validation_error(request: Request, error: Exception) -> Response:
    """Report the first error only, and never the input: both can be megabytes."""
    first = cast(RequestValidationError, error).errors()[0]
    context = first.get("ctx", {})
    # A validator of several fields names one of them itself, relative to its own location.
    where = [*map(str, first["loc"][1:]), *([context["param"]] if "param" in context else [])]
    param = None
    if first["type"] == "json_invalid":
        message = f"the request body is not valid JSON: {context['error']}"
    elif not where:
        message = "the request body must be a JSON object, sent as Content-Type: application/json"
    else:
        param = ".".join(where)
        message = f"{param[:_MAX_PARAM]}: {first['msg']}"
    return _response(400, envelope(message, "invalid_request_error", param=param))
