"""The lines of a batch's input file, `{"custom_id", "method", "url", "body"}`, and their validation."""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from starlette.exceptions import HTTPException

from app.http.json_body import read_json

_MAX_CUSTOM_ID: Final = 512
_SKIPPED_AT_ONCE: Final = 1 << 16
# The least cost of a line in bytes of a piece: a short line takes as long as so many bytes.
_LINE_COST: Final = 1024
# Fields of a body that ask for a response which is no object, or not now.
_IMPOSSIBLE: Final = ("stream", "background")


class Line(NamedTuple):
    """A line of the file; `text` is None if the line is longer than allowed."""

    number: int
    text: bytes | None


class Piece(NamedTuple):
    """Some lines of the file one after another, without blank ones.

    num_read: the lines so far, blank ones too.
    """

    num_read: int
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class LineRules:
    """The rules for the lines of a batch.

    urls: the endpoints that a line may name.
    max_line_bytes, max_lines: limits of one line, and of those of one file, blank ones too.
    """

    urls: Container[str]
    max_line_bytes: int
    max_lines: int


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line; `body` is JSON text."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(Exception):
    """A line that is not a valid request; the other lines of the file are served.

    custom_id: the line's id; None if it has none.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class NotJsonLines(Exception):
    """The file as a whole is invalid: not one JSON object per line, no lines, or too many.

    number: the number of the line at fault; None if it is the file.
    reason: the message without it.
    """

    def __init__(self, code: str, message: str, number: int | None = None) -> None:
        super().__init__(message if number is None else f"line {number}: {message}")
        self.code = code
        self.reason = message
        self.number = number


def read_pieces(path: Path, max_bytes: int, piece_bytes: int = 1 << 20) -> Iterator[Piece]:
    """Yield the lines of a file in pieces, each of which is as much work as `piece_bytes`, and one line.

    A piece may have no line: blank ones are work, too, and so is the rest of one that is too long.
    """
    num_read, lines, cost = 0, [], 0
    with path.open("rb") as file:
        for num_bytes, line in _read_lines(file, max_bytes):
            cost += max(num_bytes, _LINE_COST)
            if line is not None:
                num_read = line.number
                if line.text is None or not line.text.isspace():
                    lines.append(line)
            if cost >= piece_bytes:
                yield Piece(num_read, lines)
                lines, cost = [], 0
        yield Piece(num_read, lines)


def _read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, Line | None]]:
    """Yield how many bytes have been read, and the line if that was its end."""
    number = 0
    while text := file.readline(max_bytes + 1):
        number += 1
        is_long = len(text) > max_bytes and not text.endswith(b"\n")
        if not is_long:
            yield len(text), Line(number, text)
            continue
        while (rest := file.readline(_SKIPPED_AT_ONCE)) and not rest.endswith(b"\n"):
            yield len(rest), None
        yield len(text) + len(rest), Line(number, None)


def parse_line(line: Line, rules: LineRules) -> LineRequest:
    """Return the request of a line.

    Raises:
        BadLine: the line is not a request to one of these endpoints.
        NotJsonLines: the line is not a JSON object.
    """
    fields = read_fields(line, rules.max_line_bytes)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {_MAX_CUSTOM_ID} characters"
        raise BadLine("invalid_custom_id", message)
    if (fault := _fault(fields, rules)) is not None:
        raise BadLine(*fault, custom_id)
    body = json.dumps(fields["body"]).encode()
    return LineRequest(line.number, custom_id, fields["url"], body)


def read_fields(line: Line, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        BadLine: the line is too long.
        NotJsonLines: the line is not a JSON object.
    """
    if line.text is None:
        raise BadLine("line_too_long", f"the line is longer than {max_bytes} bytes")
    try:
        fields = read_json(line.text)
    except HTTPException as error:
        raise BadLine("line_too_large", error.detail) from None
    except json.JSONDecodeError as error:
        raise NotJsonLines(
            "invalid_json_line", f"this is not JSON: {error.msg}", line.number
        ) from None
    if not isinstance(fields, dict):
        raise NotJsonLines("invalid_json_line", "this is not a JSON object", line.number)
    return fields


def _fault(fields: dict[str, Any], rules: LineRules) -> tuple[str, str] | None:
    """Return the code and the message of what is wrong with the fields beside the custom_id."""
    if fields.get("method") != "POST":
        return "invalid_method", "method must be POST"
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in rules.urls:
        return "invalid_url", "url must be the endpoint of the batch"
    if not isinstance(body, dict):
        return "invalid_body", "body must be an object"
    for name in _IMPOSSIBLE:
        if body.get(name) not in (None, False):
            return "invalid_body", f"body.{name}: this is not possible in a batch"
    return None
