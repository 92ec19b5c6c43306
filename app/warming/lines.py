"""The lines of a file of prompts: bodies of chat requests, or lines of a batch, which have one."""

from typing import Any, Final

from app.batches.lines import BadLine, Line, NotJsonLines, read_fields

URL: Final = "/v1/chat/completions"
# What would ask for more output than a token, and what cannot be without that.
_DROPPED: Final = frozenset(
    {
        *("max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"),
        *("min_tokens", "min_new_tokens", "n", "stream_options"),
    }
)


def warming_body(line: Line, max_bytes: int) -> dict[str, Any]:
    """Return the body of a request that reads the prompt of a line, and writes one token.

    Raises:
        BadLine: the line has none.
    """
    try:
        fields = read_fields(line, max_bytes)
    except NotJsonLines as error:
        raise BadLine(error.code, error.reason) from None
    if "body" not in fields:
        return _shortened(fields)
    if fields.get("url", URL) != URL:
        raise BadLine("invalid_url", f"url must be {URL}")
    body = fields["body"]
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object")
    return _shortened(body)


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return {**kept, "max_tokens": 1, "stream": False}
