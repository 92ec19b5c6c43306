"""The documentation in OpenAPI of error responses, and of responses that are streams of events."""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """Some errors carry further fields, such as `n_ctx`."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorDetail


_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The request is wrong; the error names the field.",
    401: "The API key is missing or unknown.",
    404: "There is no such model or path.",
    405: "The path does not take this method.",
    408: "The request has not come in time.",
    413: "The body is too large.",
    429: "The API key is at its limit; `Retry-After` says when to retry.",
    500: "The server failed while serving this request.",
    503: "The queue is full, the server shuts down or its model has failed; `Retry-After` says when to retry.",
    504: "The timeout of the request is over.",
    # With this one, FastAPI does not document a 422, which is never sent.
    "default": "Any other error.",
}


def error_responses(envelope: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the documents of errors in one format, for the `responses` of a router."""
    return {
        status: {"model": envelope, "description": description}
        for status, description in _DESCRIPTIONS.items()
    }


ERROR_RESPONSES: Final = error_responses(ErrorEnvelope)

_EVENT: Final = {"type": "object", "properties": {"data": {"type": "string"}}}

# For the endpoints that stream.
EVENT_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The response; with `stream: true` as server-sent events.",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
}

# For responses that are not JSON.
TEXT_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
