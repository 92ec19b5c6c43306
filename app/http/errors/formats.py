"""How an error is written for the clients of each API."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope

# Limits in characters for text of the client that a message repeats.
_MAX_MESSAGE: Final = 500
_MAX_PARAM: Final = 100

_MESSAGES: Final = "/v1/messages"
_MODELS: Final = "/v1/models"
_OLLAMA: Final = "/api/"

# Anthropic's type of a status; any other is the request's fault below 500, else the server's.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_OVERLOADED: Final = ("queue_full", "shutting_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An error as a client gets it; `type` and `code` are OpenAI's.

    param: the field at fault.
    context: for a prompt that is too long: its tokens, and those of the context.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    context: tuple[int, int] | None = None


# Takes the report and the request's id.  The text is ASCII: a lone surrogate of a request cannot be
# encoded otherwise.
ErrorFormat = Callable[[ErrorReport, str], str]


def openai_error(report: ErrorReport, request_id: str = "") -> str:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    error: dict[str, Any] = {
        "message": report.message[:_MAX_MESSAGE],
        "type": report.type,
        "param": None if report.param is None else report.param[:_MAX_PARAM],
        "code": report.code,
    }
    if report.context is not None:
        # llama.cpp's keys: agents use these numbers to shorten their history.
        error |= dict(zip(("n_prompt_tokens", "n_ctx"), report.context, strict=True))
    return json.dumps({"error": error})


def anthropic_error(report: ErrorReport, request_id: str) -> str:
    """Return `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    error = {"type": _anthropic_type(report), "message": _anthropic_message(report)[:_MAX_MESSAGE]}
    return json.dumps({"type": "error", "error": error, "request_id": request_id})


def ollama_error(report: ErrorReport, request_id: str = "") -> str:
    """Return `{"error": message}`."""
    return json.dumps({"error": _message(report)[:_MAX_MESSAGE]})


def error_format(scope: Scope) -> ErrorFormat:
    """Return the format that the client of a request expects."""
    if scope["path"].startswith(_OLLAMA):
        return ollama_error
    return anthropic_error if is_anthropic(scope) else openai_error


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is of Anthropic's API; both APIs list models, at the same path."""
    if _is_at(_MODELS, scope["path"]):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return _is_at(_MESSAGES, scope["path"])


def _is_at(root: str, path: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _anthropic_type(report: ErrorReport) -> str:
    if report.code in _OVERLOADED:
        return "overloaded_error"
    other = "invalid_request_error" if report.status < 500 else "api_error"
    return _ANTHROPIC_TYPES.get(report.status, other)


def _anthropic_message(report: ErrorReport) -> str:
    if report.context is not None:
        # Agents read both numbers, and shorten their history by the difference: it is never 0,
        # since a prompt that fills the context leaves no room for a token.
        num_tokens, limit = report.context
        return f"prompt is too long: {num_tokens} tokens > {min(limit, num_tokens - 1)} maximum"
    return _message(report)


def _message(report: ErrorReport) -> str:
    """Return the message, which names the field where there is no member for it."""
    param = None if report.param is None else report.param[:_MAX_PARAM]
    if param is None or report.message.startswith(param):
        return report.message
    return f"{param}: {report.message}"
