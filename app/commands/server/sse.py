"""Reads a stream of server-sent events as the OpenAI API sends it: JSON chunks, then `[DONE]`."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

# A chunk's fields are of many types.
Chunk = dict[str, Any]


class BadStream(Exception):
    """A stream is not one of JSON objects, or ends before `[DONE]`."""


def read_chunks(pieces: Iterable[bytes]) -> Iterator[Chunk | None]:
    """Yield the chunks of a stream up to `[DONE]`, and None for each comment.

    A comment shows that the server still works on the request.  Every event has one `data` line.

    Raises:
        BadStream: the stream breaks off, or an event is no JSON object.
    """
    for line in _lines(pieces):
        field, _, value = line.partition(b":")
        if line.startswith(b":"):
            yield None
        elif field == b"data":
            if value.strip() == b"[DONE]":
                return
            yield _chunk_in(value)
    raise BadStream("the answer breaks off")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the complete lines; texts within may have other line ends of Unicode."""
    incomplete = b""
    for piece in pieces:
        *lines, incomplete = (incomplete + piece).split(b"\n")
        yield from lines


def _chunk_in(value: bytes) -> Chunk:
    try:
        chunk = json.loads(value)
    except ValueError:
        raise BadStream("the answer is no stream of JSON") from None
    if not isinstance(chunk, dict):
        raise BadStream("the answer is no stream of JSON objects")
    return chunk
