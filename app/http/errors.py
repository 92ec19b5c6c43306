"""What went wrong, in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
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

# What clients send comes back in a message at most at this length.
_MAX_MESSAGE: Final = 500
_MAX_PARAM: Final = 100


class Answer(NamedTuple):
    """How a condition is told; `message` stands in for a text that clients should not see."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    message: str | None = None


ANSWERS: Final[dict[type[BaseException], Answer]] = {
    ContextLengthExceeded: Answer(400, code="context_length_exceeded"),
    RequestError: Answer(400),
    ModelNotFound: Answer(404, code="model_not_found"),
    RequestFailed: Answer(500, "server_error"),
    EngineStopped: Answer(503, "server_error"),
    EngineStalled: Answer(503, "server_error", "engine_stalled"),
    DeadlineExceeded: Answer(504, "timeout_error", "deadline_exceeded"),
    Unauthorized: Answer(401, code="invalid_api_key"),
    BodyTooLarge: Answer(413, code="request_too_large"),
    BodyTooSlow: Answer(408, code="request_timeout"),
    QuotaExceeded: Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: Answer(503, "server_error", "queue_full"),
    ShuttingDown: Answer(503, "server_error", "shutting_down"),
    Unavailable: Answer(503, "server_error", "unavailable"),
    # Its text is for the operator: it may name files of this machine.
    ModelLoadError: Answer(500, "server_error", None, "the model cannot be loaded"),
    Exception: Answer(500, "server_error", None, "the server failed while serving this request"),
}


# Nobody gets it; nginx's number for a client that left, should it be logged somewhere.
CLIENT_CLOSED_REQUEST: Final = 499

# What a refusal is counted as.
REJECTION_REASONS: Final = ("queue_full", "rate_limit_exceeded", "shutting_down")


def answer_for(error: Exception) -> Answer:
    """Return the answer of the nearest class that has one."""
    return next(ANSWERS[cls] for cls in type(error).__mro__ if cls in ANSWERS)


def envelope(
    message: str, kind: str, *, param: str | None = None, code: str | None = None, **extra: int
) -> str:
    """Return the body of an error.

    ASCII only: a lone surrogate that a client sent cannot be encoded otherwise.
    """
    error: dict[str, Any] = {
        "message": message[:_MAX_MESSAGE],
        "type": kind,
        "param": None if param is None else param[:_MAX_PARAM],
        "code": code,
    }
    return json.dumps({"error": error | extra})


def error_body(error: Exception) -> str:
    """Return the body that tells of an exception, for a response or for an event."""
    answer = answer_for(error)
    message = str(error) if answer.message is None else answer.message
    param = error.param if isinstance(error, RequestError) else None
    extra: dict[str, int] = {}
    if isinstance(error, ContextLengthExceeded):
        # llama.cpp's keys: agents that shorten their history read these numbers.
        extra = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.limit}
    return envelope(message, answer.type, param=param, code=answer.code, **extra)


def headers_for(error: Exception) -> dict[str, str]:
    """Return what clients read without looking at the body."""
    headers: dict[str, str] = {}
    if isinstance(error, Rejection) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients try again after a 5xx; the client that set the time has no more of it.
        headers["X-Should-Retry"] = "false"
    return headers


def error_response(error: Exception) -> Response:
    """Return what an exception is answered with; middleware sends it itself."""
    return Response(
        error_body(error),
        answer_for(error).status,
        headers_for(error),
        media_type="application/json",
    )


def install(app: FastAPI) -> None:
    """Have every error that is raised on purpose answered in the envelope.

    `app/http/request_context.py` answers the others.
    """
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(EngineError, _answer_exception)
    app.add_exception_handler(Rejection, _answer_exception)


def _response(status: int, body: str) -> Response:
    return Response(body, status, media_type="application/json")


async def _answer_exception(request: Request, error: Exception) -> Response:
    if isinstance(error, ModelLoadError):
        logger.error("%s", error)
    code = answer_for(error).code
    if code in REJECTION_REASONS:
        request.app.state.service.metrics.refused(code)
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)  # the handler is installed for this class
    message, code = error.detail, None
    if error.status_code == 404:
        message, code = f"there is no {request.url.path} here", "unknown_url"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        code = "method_not_supported"
    response = _response(error.status_code, envelope(message, "invalid_request_error", code=code))
    response.headers.update(error.headers or {})
    return response


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """Tell the first fault only, and never what was sent: both can be megabytes."""
    fault = cast(RequestValidationError, error).errors()[0]
    told = fault.get("ctx", {})
    # A rule over several fields names one of them itself, relative to where it stands.
    where = [*map(str, fault["loc"][1:]), *([told["param"]] if "param" in told else [])]
    param = None
    if fault["type"] == "json_invalid":
        message = f"the request body is not valid JSON: {told['error']}"
    elif not where:
        message = "the request body must be a JSON object, sent as Content-Type: application/json"
    else:
        param = ".".join(where)
        message = f"{param[:_MAX_PARAM]}: {fault['msg']}"
    return _response(400, envelope(message, "invalid_request_error", param=param))
