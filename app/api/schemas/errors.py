"""What is documented of answers that are no success, and of answers that come as events."""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What was wrong; some errors tell numbers besides, such as `n_ctx`."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorDetail


_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The request is wrong; `param` names the field.",
    401: "There is no key, or it is not known.",
    404: "There is no such model or path.",
    405: "The path does not take this method.",
    408: "The request has not come in time.",
    413: "The body is too large.",
    429: "The client has enough in hand; `Retry-After` says when to come again.",
    500: "The server failed while serving this request.",
    503: "The server is full, shuts down or has lost its model; `Retry-After` says when to come again.",
    504: "The time that the request gave has run out.",
    # With this one, FastAPI does not document a 422, which is never sent.
    "default": "Any other error.",
}

# For `include_router(..., responses=...)`.
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorEnvelope, "description": description}
    for status, description in _DESCRIPTIONS.items()
}

_EVENT: Final = {"type": "object", "properties": {"data": {"type": "string"}}}

# For the endpoints that stream.
EVENT_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The answer; with `stream: true` as server-sent events.",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
}

# For what is no JSON.
TEXT_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
