"""The lines of output and error files, in OpenAI's format."""

import json
from typing import Any, Final

from app.batches.lines import BadLine, LineRequest
from app.http.inner_call import InnerResponse

_OK: Final = 200
_MAX_SHOWN: Final = 500


class Record:
    """The result of a line: a line of the output file, or with `is_error` of the error file."""

    __slots__ = ("is_error", "number", "text")

    def __init__(self, number: int, text: bytes, *, is_error: bool) -> None:
        self.number = number
        self.text = text
        self.is_error = is_error


def record_id(batch_id: str, number: int) -> str:
    """Return the id of a line's result, which is also the request id in the log."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def response_record(batch_id: str, request: LineRequest, response: InnerResponse) -> Record:
    """Return the result for a response, with the body unchanged."""
    request_id = record_id(batch_id, request.number)
    head = {"id": request_id, "custom_id": request.custom_id}
    start = {"status_code": response.status, "request_id": request_id}
    text = b'%b, "response": %b, "body": %b}, "error": null}' % (
        json.dumps(head)[:-1].encode(),
        json.dumps(start)[:-1].encode(),
        # A body that has line ends is the same JSON without them.
        response.body.replace(b"\n", b" "),
    )
    return Record(request.number, text, is_error=response.status != _OK)


def error_record(
    batch_id: str, number: int, code: str, message: str, custom_id: str | None = None
) -> Record:
    """Return the result of a line that has no response."""
    error: dict[str, Any] = {"code": code, "message": message[:_MAX_SHOWN], "line": number}
    record = {
        "id": record_id(batch_id, number),
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }
    return Record(number, json.dumps(record).encode(), is_error=True)


def bad_line_record(batch_id: str, number: int, error: BadLine) -> Record:
    message = f"line {number}: {error}"
    return error_record(batch_id, number, error.code, message, error.custom_id)
