"""Maps exceptions to responses, in the error format of the API that a path belongs to."""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from app.http.errors.formats import ErrorReport, error_format
from app.http.errors.invalid_requests import (
    ConversationLocked,
    ConversationNotFound,
    InvalidEncryptedContent,
    InvalidImage,
    ItemNotFound,
    PreviousResponseNotFound,
)
from app.http.errors.rejections import (
    BodyTooLarge,
    BodyTooSlow,
    FilesTooLarge,
    Forbidden,
    ForeignOrigin,
    HostNotAllowed,
    ModelNotReady,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Rejection,
    ShuttingDown,
    Unauthorized,
    Unavailable,
)
from app.observability.logs import summarize_exception
from batching import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineStalled,
    EngineStopped,
    ModelLoadError,
    ModelNotFound,
    ModelTooLarge,
    RankLost,
    RequestError,
    RequestFailed,
    SlowReader,
)

logger = logging.getLogger(__name__)

# The limit in characters of a field's name in a message.
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
    PreviousResponseNotFound: ErrorSpec(400, code="previous_response_not_found"),
    InvalidEncryptedContent: ErrorSpec(400, code="invalid_encrypted_content"),
    InvalidImage: ErrorSpec(400, code="invalid_image"),
    ConversationNotFound: ErrorSpec(404, code="not_found"),
    ConversationLocked: ErrorSpec(400, code="conversation_locked"),
    ItemNotFound: ErrorSpec(404),
    ModelNotFound: ErrorSpec(404, code="model_not_found"),
    ModelTooLarge: ErrorSpec(400, code="model_too_large"),
    RequestFailed: ErrorSpec(500, "server_error"),
    SlowReader: ErrorSpec(503, "server_error", "slow_reader"),
    EngineStopped: ErrorSpec(503, "server_error"),
    EngineClosed: ErrorSpec(503, "server_error", "shutting_down"),
    RankLost: ErrorSpec(503, "server_error", "rank_lost"),
    EngineStalled: ErrorSpec(503, "server_error", "engine_stalled"),
    DeadlineExceeded: ErrorSpec(504, "timeout_error", "deadline_exceeded"),
    Unauthorized: ErrorSpec(401, code="invalid_api_key"),
    HostNotAllowed: ErrorSpec(403, code="host_not_allowed"),
    ForeignOrigin: ErrorSpec(403, code="origin_not_allowed"),
    Forbidden: ErrorSpec(403, "permission_error", "forbidden"),
    NotFound: ErrorSpec(404, code="not_found"),
    BodyTooLarge: ErrorSpec(413, code="request_too_large"),
    FilesTooLarge: ErrorSpec(413, code="file_too_large"),
    BodyTooSlow: ErrorSpec(408, code="request_timeout"),
    QuotaExceeded: ErrorSpec(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: ErrorSpec(503, "server_error", "queue_full"),
    ModelNotReady: ErrorSpec(503, "server_error", "model_not_ready"),
    ShuttingDown: ErrorSpec(503, "server_error", "shutting_down"),
    Unavailable: ErrorSpec(503, "server_error", "unavailable"),
    # Its message is for the operator: it may contain paths of this machine.
    ModelLoadError: ErrorSpec(500, "server_error", None, "the model cannot be loaded"),
    Exception: ErrorSpec(500, "server_error", None, "the server failed while serving this request"),
}


# nginx's status for a client that disconnected; it is never received, and not logged.
CLIENT_CLOSED_REQUEST: Final = 499

# The codes that count as rejections by admission control: every 429, and 503 for lack of capacity; one
# for connections is counted by the server, before there is a request.
REJECTION_REASONS: Final = (
    "queue_full",
    "rate_limit_exceeded",
    "shutting_down",
    "too_many_connections",
)


# Seconds after which a request that a shutdown has ended is worth another try.
_RESTART_SECONDS: Final = 10

CountRejection = Callable[[str], None]


def ignore_rejection(code: str) -> None:
    """Count nothing."""


def error_spec(error: Exception) -> ErrorSpec:
    """Return the entry of the nearest class that has one."""
    return next(ERROR_SPECS[cls] for cls in type(error).__mro__ if cls in ERROR_SPECS)


def error_report(error: Exception) -> ErrorReport:
    """Return what a client is told about an exception."""
    spec = error_spec(error)
    return ErrorReport(
        status=spec.status,
        message=str(error) if spec.message is None else spec.message,
        type=spec.type,
        code=spec.code,
        param=error.param if isinstance(error, RequestError) else None,
        context=(error.num_prompt_tokens, error.limit)
        if isinstance(error, ContextLengthExceeded)
        else None,
    )


def stream_error_report(error: Exception) -> ErrorReport:
    """Return the report of an exception that ends a stream, whose status 200 is sent already.

    An unexpected exception is logged.
    """
    if not isinstance(error, EngineError):
        logger.error("a stream failed: %s", summarize_exception(error))
    return error_report(error)


def headers_for(error: Exception) -> dict[str, str]:
    """Return the header fields that depend on the exception."""
    headers: dict[str, str] = {}
    if isinstance(error, Rejection) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, EngineClosed):
        headers["Retry-After"] = str(_RESTART_SECONDS)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients retry after a 5xx, but the time that the client set is over.
        headers["X-Should-Retry"] = "false"
    return headers


def error_response(error: Exception, scope: Scope, count_rejection: CountRejection) -> Response:
    """Return the response to an exception, and count it if it is a rejection.

    All responses to exceptions are made here, so no rejection is missed: the exception handlers
    return them, and middleware, which runs outside of those, sends them.
    """
    report = error_report(error)
    if isinstance(error, Rejection) and report.code in REJECTION_REASONS:
        count_rejection(report.code)
    response = _response(report, scope)
    response.headers.update(headers_for(error))
    return response


def _response(report: ErrorReport, scope: Scope) -> Response:
    request_id = scope.get("state", {}).get("request_id", "-")
    body = error_format(scope)(report, request_id)
    return Response(body, report.status, media_type="application/json")


def register_handlers(app: FastAPI, count_rejection: CountRejection = ignore_rejection) -> None:
    """Register the responses to expected exceptions.

    `app/http/request_context.py` responds to unexpected ones.
    """

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, ModelLoadError):
            logger.error("%s", error)
        return error_response(error, request.scope, count_rejection)

    app.add_exception_handler(RequestValidationError, _respond_to_validation_error)
    app.add_exception_handler(HTTPException, _respond_to_http_exception)
    app.add_exception_handler(EngineError, respond)
    app.add_exception_handler(Rejection, respond)


async def _respond_to_http_exception(request: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)  # the handler is registered for this class
    message, code = error.detail, None
    if error.status_code == 404:
        message, code = f"there is no {request.url.path} here", "unknown_url"
    elif error.status_code == 405:
        message = f"{request.url.path} does not allow the method {request.method}"
        code = "method_not_supported"
    report = ErrorReport(status=error.status_code, message=message, code=code)
    response = _response(report, request.scope)
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
    return _response(ErrorReport(status=400, message=message, param=param), request.scope)
